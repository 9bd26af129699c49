"""Tests of `launch/api/`."""
