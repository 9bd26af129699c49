"""Tests of `services/engine/`."""
