"""How long processes take from their start until they are ready, as their supervisor tells it."""

import time
from collections import defaultdict
from collections.abc import Callable

from protocol.messages import ProcessStatus


class Starts:
    """Told of every change of a process; keeps the times of its starts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        self.took_s: dict[str, list[float]] = defaultdict(list)
        """By role."""

    def note(self, status: ProcessStatus) -> None:
        """A process has changed."""
        if status.state == "starting":
            self._since[status.role] = self._clock()
        elif status.state == "running" and status.role in self._since:
            self.took_s[status.role].append(self._clock() - self._since.pop(status.role))

    def latest_s(self, role: str) -> float:
        """The last start of this role; one that is not over yet counts up to now."""
        if role in self._since:
            return self._clock() - self._since[role]
        return self.took_s[role][-1] if self.took_s[role] else 0.0
