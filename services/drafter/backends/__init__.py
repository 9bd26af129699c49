"""Drafter backends. `base.py` defines their interface."""
