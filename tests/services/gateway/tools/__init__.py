"""Tests of `services/gateway/tools/`."""
