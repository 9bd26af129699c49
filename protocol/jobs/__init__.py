"""Requests and results of helper processes, as typed JSON lines."""
