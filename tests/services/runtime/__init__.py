"""Tests of `services/runtime/`."""
