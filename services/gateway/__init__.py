"""The OpenAI-compatible door: HTTP in front of the orchestrator, a client of it like any other."""
