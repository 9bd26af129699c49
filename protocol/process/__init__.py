"""Start and end of every process: signals, logs, cleaning up."""
