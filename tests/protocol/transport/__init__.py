"""Tests of `protocol/transport/`."""
