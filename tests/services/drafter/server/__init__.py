"""Tests of `services/drafter/server/`."""
