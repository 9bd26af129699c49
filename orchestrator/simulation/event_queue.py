"""Virtual time: future events, in order."""

import heapq
from collections.abc import Callable
from itertools import count


class EventQueue:
    """A clock that jumps from event to event. Times in milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, milliseconds: float, happen: Callable[[], None]) -> None:
        """Schedule an event after this delay; simultaneous events keep their order."""
        heapq.heappush(self._events, (self.now + milliseconds, next(self._order), happen))

    def step(self) -> bool:
        """Jump to the next event; return False if there is none."""
        if not self._events:
            return False
        self.now, _, happen = heapq.heappop(self._events)
        happen()
        return True
