"""Tests of `protocol/client/`."""
