"""What a sequence waits for."""

from enum import Enum, auto


class Phase(Enum):
    """What a sequence waits for between two events."""

    VERIFYING = auto()
    DRAFTING = auto()
    """The target waits for a draft."""
    STRANDED = auto()
    """There is no verifier."""
    HELD = auto()
    """Others have their turn."""
    FINISHED = auto()
