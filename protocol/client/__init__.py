"""The client side of a request to an orchestrator."""
