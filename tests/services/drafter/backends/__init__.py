"""Tests of `services/drafter/backends/`."""
