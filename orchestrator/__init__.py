"""The orchestrator: sequences, the speculation cache, plans, text, and client connections."""
