"""Tests of `services/drafter/relay/`."""
