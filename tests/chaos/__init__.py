"""Faults under load: `make chaos` and `make soak`, and the tests that run them for a short while."""
