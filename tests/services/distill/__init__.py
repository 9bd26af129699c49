"""Tests of `services/distill/`."""
