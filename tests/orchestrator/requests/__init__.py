"""Tests of `orchestrator/requests/`."""
