"""What every process needs at its start and at its end: signals, logs, cleaning up."""
