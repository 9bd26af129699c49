"""Drafter backends. `interface.py` says how to write one."""
