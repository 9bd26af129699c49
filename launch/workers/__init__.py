"""Clients of helper processes."""
