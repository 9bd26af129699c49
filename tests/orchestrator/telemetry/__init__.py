"""Tests of `orchestrator/telemetry/`."""
