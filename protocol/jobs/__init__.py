"""Questions and answers of helper processes, as typed JSON lines."""
