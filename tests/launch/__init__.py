"""Tests of `launch/`."""
