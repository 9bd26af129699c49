"""Tests of `launch/models/`."""
