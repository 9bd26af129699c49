"""The open sequences of a service, by the orchestrator's number."""

from typing import TypeVar

from protocol.errors import ProtocolError

S = TypeVar("S")

TRIAL_SEQUENCE = -1
"""The sequence of passes that only prepare a service. The orchestrator numbers its from 1."""


class SequenceTable(dict[int, S]):
    """A map in which a missing sequence raises a ProtocolError."""

    def __missing__(self, sequence: int) -> S:
        raise ProtocolError(f"sequence {sequence} is not open")


def check_rewind(length: int, base: int) -> None:
    """Raise ProtocolError if `length` tokens cannot be cut to the first `base`."""
    if base > length:
        raise ProtocolError(f"cannot rewind {length} tokens to {base}")
