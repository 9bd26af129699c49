"""Tests of `services/batching/`."""
