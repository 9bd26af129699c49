"""Phases of a sequence."""

from enum import Enum, auto


class Phase(Enum):
    """The event that a sequence waits for."""

    VERIFYING = auto()
    DRAFTING = auto()
    """The target waits for a draft."""
    STRANDED = auto()
    """There is no verifier."""
    HELD = auto()
    """Other requests have their turn."""
    FINISHED = auto()
