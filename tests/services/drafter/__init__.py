"""Tests of `services/drafter/`."""
