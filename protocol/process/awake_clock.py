"""A clock that stands still while this process is stopped, or its machine sleeps.

A deadline that went on while the process itself did not run has found out nothing about others:
after the lid of a laptop was closed, all of them would have passed at once.
"""

import threading
import time
from collections.abc import Callable

_TICK_S = 0.2
_LONGEST_STEP_S = 1.0
"""More than this between two ticks means that this process was not awake."""


class AwakeClock:
    """Seconds of `clock`, but no more than `longest_step_s` between two readings."""

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
        """The time; somebody has to ask for it at least once in `longest_step_s`."""
        with self._lock:
            now = self._clock()
            step_s = now - self._last
            self._last = now
            # A clock that went back has stood still, too.
            self._asleep_s += step_s - min(max(0.0, step_s), self._longest_step_s)
            return now - self._asleep_s


class _Ticking:
    """The clock of this process, with a thread that reads it all the time."""

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
    """Seconds for which this process has been awake, from some moment on; for any thread."""
    return _process_clock.read()
