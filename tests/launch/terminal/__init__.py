"""Tests of `launch/terminal/`."""
