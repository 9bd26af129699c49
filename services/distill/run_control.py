"""One call of the process: its events, its time limits, and its stop flag."""

import signal
import sys
import time
from types import FrameType

import msgspec

from protocol.jobs.distill import DistillEvent, DistillProgress

_SAY_EVERY_S = 1.0


class RunControl:
    """Writes JSON lines to stdout; SIGINT, SIGTERM and the time limit request a stop.

    Args:
        limit_s: for this call; 0 means no limit.
    """

    def __init__(self, limit_s: float = 0.0) -> None:
        self._started = time.monotonic()
        self._ends = self._started + limit_s if limit_s else float("inf")
        self._run_ends = float("inf")
        self._asked = False
        self._last_event = 0.0

    def listen(self) -> None:
        """Treat SIGINT and SIGTERM as a request to stop at the next safe point."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked = True

    def limit_run(self, limit_s: float, spent_s: float) -> None:
        """Limit the run over all its calls; earlier ones took `spent_s`."""
        self._run_ends = self._started + limit_s - spent_s

    @property
    def run_left_s(self) -> float:
        """The seconds left of the run, infinite without a limit; negative after its end."""
        return self._run_ends - time.monotonic()

    @property
    def stopping(self) -> bool:
        """True if the run should save its state and end."""
        return self._asked or time.monotonic() > self._ends

    def say(self, event: DistillEvent) -> None:
        """Write one event; progress at most once a second, except at its end."""
        now = time.monotonic()
        if isinstance(event, DistillProgress):
            if now - self._last_event < _SAY_EVERY_S and event.done < 1:
                return
            self._last_event = now
            if self._run_ends < float("inf"):
                left_s = max(0.0, self.run_left_s)
                event = msgspec.structs.replace(event, run_seconds_left=left_s)
        sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
        sys.stdout.flush()
