"""Tests of `services/coreml/`."""
