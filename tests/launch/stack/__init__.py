"""Tests of `launch/stack/`."""
