"""The heartbeat of a service's working thread, and its patience with the orchestrator.

Only the thread that does the work beats: a second thread would go on saying that all is
well while the first one hangs in a driver. Between two beats lies one indivisible call at
most (a verification, a chunk of a prefill, one depth of a tree).
"""

import time
from collections.abc import Callable
from typing import Protocol

from protocol.errors import DeadlineExceeded
from protocol.messages import FromService, Heartbeat

BEAT_S = 1.0
_MOST_UNANSWERED = 60
"""Beats in a row without a word from the orchestrator, after which it is taken for dead."""


class Sender(Protocol):
    """The way to the orchestrator."""

    def send(self, message: FromService) -> None:
        """Queue a message."""
        ...


class HeartbeatTimer:
    """Beats when nothing else was sent for a while; counts beats that were not answered."""

    def __init__(self, way: Sender, clock: Callable[[], float] = time.monotonic) -> None:
        self._way = way
        self._clock = clock
        self._sent_at = clock()
        self._unanswered = 0

    @property
    def wait_s(self) -> float:
        """How long one may wait for work before the next beat is due."""
        return max(0.0, self._sent_at + BEAT_S - self._clock())

    def on_send(self) -> None:
        """Something was sent, which is as good as a beat."""
        self._sent_at = self._clock()

    def on_receive(self) -> None:
        """The orchestrator said something."""
        self._unanswered = 0

    def beat(self, sequence: int = 0, *, early: bool = False) -> None:
        """Say so if a beat is due, or `early`; `sequence` is what is being worked on.

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
