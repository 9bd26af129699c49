"""A clock that pauses while this process is stopped, or its machine sleeps.

A deadline that expires while the process itself was not running says nothing about other processes:
after closing a laptop's lid, all deadlines would pass at once.
"""

import threading
import time
from collections.abc import Callable

_TICK_S = 0.2
_LONGEST_STEP_S = 1.0
"""A longer gap between two ticks means that this process was suspended."""


class AwakeClock:
    """Seconds of `clock`, at most `longest_step_s` between two readings."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        longest_step_s: float = _LONGEST_STEP_S,
    ) -> None:
        self._clock = clock
        self._longest_step_s = longest_step_s
        self._last = clock()
        self._asleep_s = 0.0
        self._lock = threading.Lock()

    def read(self) -> float:
        """Return the time; must be called at least once in `longest_step_s`."""
        with self._lock:
            now = self._clock()
            step_s = now - self._last
            self._last = now
            # A clock that went backwards is treated as paused.
            self._asleep_s += step_s - min(max(0.0, step_s), self._longest_step_s)
            return now - self._asleep_s


class _Ticking:
    """The clock of this process, with a thread that reads it continuously."""

    def __init__(self) -> None:
        self._clock: AwakeClock | None = None
        self._starting = threading.Lock()

    def read(self) -> float:
        clock = self._clock
        if clock is None:
            with self._starting:
                clock = self._clock = self._clock or self._start()
        return clock.read()

    @staticmethod
    def _start() -> AwakeClock:
        clock = AwakeClock()
        threading.Thread(target=_tick, args=(clock,), name="awake clock", daemon=True).start()
        return clock


def _tick(clock: AwakeClock) -> None:
    while True:
        time.sleep(_TICK_S)
        clock.read()


_process_clock = _Ticking()


def awake_time() -> float:
    """Return the seconds for which this process has been awake; for any thread."""
    return _process_clock.read()
