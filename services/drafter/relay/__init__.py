"""Drafters outside this process: programs on pipes, and machines over TCP."""
