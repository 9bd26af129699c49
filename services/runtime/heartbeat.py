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
        """Return the seconds until the next beat is due."""
        return max(0.0, self._sent_at + BEAT_S - self._clock())

    def on_send(self) -> None:
        """Record that a message was sent, which counts as a beat."""
        self._sent_at = self._clock()

    def on_receive(self) -> None:
        """Record that the orchestrator sent a message."""
        self._unanswered = 0

    def beat(self, sequence: int = 0, *, early: bool = False) -> None:
        """Send a beat if one is due, or if `early`; `sequence` is the one being worked on.

        Raises:
            DeadlineExceeded: the orchestrator has not answered for too many beats.
        """
        if self.wait_s > 0.0 and not early:
            return
        if self._unanswered >= _MOST_UNANSWERED:
            raise DeadlineExceeded(
                f"the orchestrator has been silent for {self._unanswered * BEAT_S:g} s"
            )
        self._unanswered += 1
        self._way.send(Heartbeat(sequence))
        self.on_send()
