"""Tests of `services/kv/`."""
