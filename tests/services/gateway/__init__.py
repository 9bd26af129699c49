"""Tests of `services/gateway/`."""
