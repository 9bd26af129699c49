"""Tests of `orchestrator/text/`."""
