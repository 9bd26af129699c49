"""Tests of `services/sampling/`."""
