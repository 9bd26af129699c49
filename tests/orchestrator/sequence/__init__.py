"""Tests of `orchestrator/sequence/`."""
