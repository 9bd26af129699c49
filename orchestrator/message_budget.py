"""Message budgets: a drafter may send what it was asked for; all peers are read in turn.

A drafter may be an arbitrary program. Every request to it adds the possible answers to its credit,
time adds a few heartbeats, and every message that arrives costs one. A drafter without credit is
dropped: a flood harms its sender, not the other requests.
"""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from protocol.messages import DraftNow, Message, Prepare

T = TypeVar("T")

_TURN_S = 0.02
_MOST = 512.0
"""Initial credit, and the most that a drafter can have."""
_PER_SECOND = 10.0

BYTES_OF_DRAFTERS = 256 * 1024
"""Longest message of a drafter when nothing is sampled: a tree with the most branches."""


class MessageBudget:
    """The message credit of one drafter."""

    def __init__(self) -> None:
        self._credit = _MOST
        self._refilled_at: float | None = None

    def on_sent(self, message: Message) -> None:
        """Add credit for the answers to this message."""
        answers = 2.0  # a failure, and one spare
        if isinstance(message, Prepare):
            answers += message.depth
        elif isinstance(message, DraftNow):
            answers += message.count
        self._credit = min(_MOST, self._credit + answers)

    def spend(self, now: float) -> bool:
        """Charge one received message; return False if it exceeds the credit."""
        passed_s = now - self._refilled_at if self._refilled_at is not None else 0.0
        self._credit = min(_MOST, self._credit + _PER_SECOND * passed_s)
        self._refilled_at = now
        self._credit -= 1.0
        return self._credit >= 0.0


def take_some(receive: Callable[[], T | None]) -> Iterator[T]:
    """Yield the messages of one side that one turn of the loop handles.

    Their total time is limited; the last one may exceed it.
    """
    end = time.monotonic() + _TURN_S
    while (message := receive()) is not None:
        yield message
        if time.monotonic() >= end:
            return
