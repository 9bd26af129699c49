"""Tests of `services/verifier/`."""
