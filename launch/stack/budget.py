"""How often something may be restarted before that stops being a repair."""

from collections import deque


class RestartBudget:
    """At most `restarts` within any `window_s` seconds."""

    def __init__(self, restarts: int, window_s: float) -> None:
        self._restarts = restarts
        self._window_s = window_s
        self._times: deque[float] = deque()
        self.used = 0
        """Restarts so far, ever."""

    def spend(self, now: float) -> bool:
        """Take one restart; False if the budget is spent."""
        while self._times and now - self._times[0] > self._window_s:
            self._times.popleft()
        if len(self._times) >= self._restarts:
            return False
        self._times.append(now)
        self.used += 1
        return True
