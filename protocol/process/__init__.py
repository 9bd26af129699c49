"""Start and end of every process: signals, logs, cleanup."""
