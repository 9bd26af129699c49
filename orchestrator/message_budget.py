"""What others may send: a drafter as much as it was asked for, and all of them in turn.

A drafter may be anybody's program. Every message that asks it for something adds the
answers that may come to its credit, time adds a few heartbeats, and every message that
comes takes one away, an answer to nothing more than one. When the credit is gone, it is to
be dropped: a flood costs its sender, not the other requests.
"""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from protocol.messages import DraftNow, DraftTree, Message, Prepare

T = TypeVar("T")

_MOST_MESSAGES = 64
_MOST_S = 0.02
_SLACK = 128.0
"""Credit at the beginning."""
_MOST = 4096.0
_PER_SECOND = 10.0
_UNASKED = 8.0
"""What a message costs that answers nothing."""

BYTES_OF_DRAFTERS = 256 * 1024
"""Longest message of a drafter, where nothing is drawn: a tree of the most branches."""


class MessageBudget:
    """The credit of one drafter."""

    def __init__(self) -> None:
        self._credit = _SLACK
        self._refilled_at: float | None = None

    def on_sent(self, message: Message) -> None:
        """It was sent this, and may answer."""
        answers = 2.0  # that it failed, and one more
        if isinstance(message, Prepare):
            answers += message.depth
        elif isinstance(message, DraftNow):
            answers += message.count
        self._credit = min(_MOST, self._credit + answers)

    def spend(self, message: Message, now: float, *, asked_for: bool) -> bool:
        """It sent this; False if that was too much."""
        passed_s = now - self._refilled_at if self._refilled_at is not None else 0.0
        self._credit = min(_MOST, self._credit + _PER_SECOND * passed_s)
        self._refilled_at = now
        unasked = isinstance(message, DraftTree) and not asked_for
        self._credit -= _UNASKED if unasked else 1.0
        return self._credit >= 0.0


def take_some(receive: Callable[[], T | None]) -> Iterator[T]:
    """The messages of one side that are dealt with in one turn of the loop.

    Their number and the time that they take together are limited, but for the last one's.
    """
    end = time.monotonic() + _MOST_S
    for _ in range(_MOST_MESSAGES):
        if (message := receive()) is None:
            return
        yield message
        if time.monotonic() >= end:
            return
