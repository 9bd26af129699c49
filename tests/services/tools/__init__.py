"""Tests of `services/tools/`."""
