"""One call of the process: its voice, its clock, and whether it was asked to stop."""

import signal
import sys
import time
from types import FrameType

import msgspec

from protocol.jobs.distill import DistillEvent, DistillProgress

_SAY_EVERY_S = 1.0


class RunControl:
    """Speaks JSON lines on stdout; SIGINT, SIGTERM and the time limit ask it to stop."""

    def __init__(self, limit_s: float = 0.0) -> None:
        self._ends = time.monotonic() + limit_s if limit_s else float("inf")
        self._asked = False
        self._last_event = 0.0

    def listen(self) -> None:
        """Take SIGINT and SIGTERM as a request to stop at the next safe point."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked = True

    @property
    def stopping(self) -> bool:
        """Whether to save what there is and end."""
        return self._asked or time.monotonic() > self._ends

    def say(self, event: DistillEvent) -> None:
        """Write one event; progress at most once a second, but for its end."""
        now = time.monotonic()
        if isinstance(event, DistillProgress):
            if now - self._last_event < _SAY_EVERY_S and event.done < 1:
                return
            self._last_event = now
        sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
        sys.stdout.flush()
