"""Tests of `orchestrator/learning/`."""
