"""Tests of `protocol/decoding/`."""
