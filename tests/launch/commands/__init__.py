"""Tests of `launch/commands/`."""
