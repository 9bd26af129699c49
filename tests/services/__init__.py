"""Tests of `services/`."""
