"""The heartbeat of a service's worker thread, and its timeout for the orchestrator.

Only the worker thread beats: a second thread would keep reporting health while the worker hangs in
a driver. At most one indivisible call lies between two beats (a verification, a chunk of a prefill,
one depth of a tree).
"""

import time
from collections.abc import Callable
from typing import Protocol

from protocol.errors import DeadlineExceeded
from protocol.messages import FromService, Heartbeat

BEAT_S = 1.0
_MOST_UNANSWERED = 60
"""Consecutive unanswered beats after which the orchestrator is considered dead."""

_ANNOUNCED_S = 2.0
"""A call that is expected to take longer is announced."""
_SLOWER = 10.0
"""A call may take this many times as long as expected: the machine may have become busy."""
_MOST_BUSY_S = 3600.0


class Sender(Protocol):
    """A channel to the orchestrator."""

    def send(self, message: FromService) -> None:
        """Queue a message."""
        ...


class HeartbeatTimer:
    """Sends a beat when nothing else was sent for a while, and counts unanswered beats."""

    def __init__(self, way: Sender, clock: Callable[[], float] = time.monotonic) -> None:
        self._way = way
        self._clock = clock
        self._sent_at = clock()
        self._unanswered = 0

    @property
    def wait_s(self) -> float:
        """The seconds until the next beat is due."""
        return max(0.0, self._sent_at + BEAT_S - self._clock())

    def on_send(self) -> None:
        """Record that a message was sent, which counts as a beat."""
        self._sent_at = self._clock()

    def on_receive(self) -> None:
        """Record that the orchestrator sent a message."""
        self._unanswered = 0

    def beat(self, sequence: int = 0, *, early: bool = False, expected_s: float = 0.0) -> None:
        """Send a beat if one is due, if `early`, or if the next call is expected to be long.

        Args:
            sequence: the one being worked on.
            early: send it even if it is not due.
            expected_s: how long the next call takes, as measured.

        Raises:
            DeadlineExceeded: the orchestrator has not answered for too many beats.
        """
        is_due, is_long = early or self.wait_s <= 0.0, expected_s >= _ANNOUNCED_S
        if not is_due and not is_long:
            return
        if self._unanswered >= _MOST_UNANSWERED:
            raise DeadlineExceeded(
                f"the orchestrator has been silent for {self._unanswered * BEAT_S:g} s"
            )
        self._unanswered += is_due  # announcements may follow each other within a second
        busy_s = min(_MOST_BUSY_S, _SLOWER * expected_s) if is_long else 0.0
        self._way.send(Heartbeat(sequence, busy_s))
        self.on_send()
