"""Tests of `launch/settings/`."""
