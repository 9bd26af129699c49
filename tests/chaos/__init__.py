"""Faults under load: `make chaos`, `make soak`, and the tests that run them briefly."""
