"""How long the steps of a loop take: while one runs, everybody else waits."""

import time
from collections.abc import Callable

_WINDOW_S = 10.0


class StepTimes:
    """The longest step in the last ten to twenty seconds.

    Only processor time of the loop's own thread counts, so a busy machine makes no step longer.

    Args:
        clock: of the processor time of this thread.
        now: of the window.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._now = clock, now
        self._began = clock()
        self._longest = [0.0, 0.0]
        """In this window, and in the one before."""
        self._window = int(now() / _WINDOW_S)

    def begin(self) -> None:
        """A step begins: the loop has waited for something to do."""
        self._began = self._clock()

    def end(self) -> None:
        """It is over: the loop waits again."""
        self._turn()
        self._longest[0] = max(self._longest[0], self._clock() - self._began)

    @property
    def longest_s(self) -> float:
        """Seconds that it took."""
        self._turn()
        return max(self._longest)

    def _turn(self) -> None:
        window = int(self._now() / _WINDOW_S)
        if window != self._window:
            before = self._longest[0] if window == self._window + 1 else 0.0
            self._longest, self._window = [0.0, before], window
