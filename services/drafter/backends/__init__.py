"""Drafter backends. `base.py` says how to write one."""
