"""Tests of `services/ranks/`."""
