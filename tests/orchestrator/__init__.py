"""Tests of `orchestrator/`."""
