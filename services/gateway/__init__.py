"""The OpenAI-compatible HTTP server: an ordinary client of the orchestrator."""
