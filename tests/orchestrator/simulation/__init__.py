"""Tests of `orchestrator/simulation/`."""
