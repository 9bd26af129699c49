"""The requests that are decoded, and those that wait for their turn and for memory."""

from collections import deque
from collections.abc import Iterator

from orchestrator.requests.request import Request
from orchestrator.telemetry.recorder import Recorder
from orchestrator.telemetry.window_stats import StatsWindow
from protocol.messages import WindowStats


class RequestQueue:
    """First come, first served: no request overtakes another, so none starves.

    Only background requests are overtaken, by all others.
    """

    def __init__(self, most: int, most_waiting: int) -> None:
        self._most = most
        self._most_waiting = most_waiting
        self.running: dict[int, Request] = {}
        """By the number of their sequence."""
        self.waiting: deque[Request] = deque()
        self._window = StatsWindow()

    def add(self, request: Request) -> None:
        """Put a request in line: at its end, or before the background requests there."""
        first = len(self.waiting)
        if not request.is_background:
            first = sum(not other.is_background for other in self.waiting)
        self.waiting.insert(first, request)

    def is_full(self, arriving: int = 0) -> bool:
        """Whether as many wait as may, `arriving` others included."""
        return len(self.waiting) + arriving >= self._most_waiting > 0

    @property
    def counts(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        return len(self.running), len(self.waiting)

    def start(self, kv_tokens: int) -> Iterator[Request]:
        """Start the requests whose turn has come, one by one; each counts as running at once.

        `kv_tokens` is what the target's KV may hold, 0 for any number. A request is given
        room for the longest answer that it may get, so none has to be interrupted later;
        alone it always fits, since its context is limited to that much.
        """
        while self.waiting and len(self.running) < self._most:
            request = self.waiting[0]
            taken = sum(other.most_tokens for other in self.running.values())
            if self.running and 0 < kv_tokens < taken + request.most_tokens:
                return
            self.waiting.popleft()
            self.running[request.sequence.number] = request
            yield request

    def find(self, peer: bytes, number: int) -> Request | None:
        """A client's request by its own number, if it is not over."""
        return next((r for r in self if (r.peer, r.number) == (peer, number)), None)

    def remove(self, request: Request) -> None:
        """The request is over."""
        self._window.end(request.sequence.recorder)
        self.running.pop(request.sequence.number, None)
        if request in self.waiting:
            self.waiting.remove(request)

    def update_window(self, now: float) -> None:
        """Keep the statistics of the last seconds; call at every wake-up."""
        if self._window.wake(now, busy=bool(self.running)):
            self._window.sample(now, self._recorders())

    def recent(self, now: float) -> WindowStats:
        """What all requests did in the last seconds."""
        return self._window.recent(now, self._recorders())

    def _recorders(self) -> Iterator[Recorder]:
        return (request.sequence.recorder for request in self.running.values())

    def __iter__(self) -> Iterator[Request]:
        return iter([*self.running.values(), *self.waiting])
