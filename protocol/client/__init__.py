"""The client's end of a request to an orchestrator."""
