"""Tests of `protocol/process/`."""
