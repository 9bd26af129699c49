"""Requests between their clients and their sequences: admission, queue, timeouts."""
