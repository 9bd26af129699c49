"""The requests in hand: those that are decoded, and those in line for their turn and for memory."""

from collections import deque
from collections.abc import Iterator

from orchestrator.requests.request import Request
from orchestrator.telemetry.recorder import Recorder
from orchestrator.telemetry.window_stats import StatsWindow
from protocol.messages import WindowStats


class RequestQueue:
    """First come, first served: nobody overtakes, so nobody starves."""

    def __init__(self, most: int, most_waiting: int) -> None:
        self._most = most
        self._most_waiting = most_waiting
        self.running: dict[int, Request] = {}
        """By the number of their sequence."""
        self.waiting: deque[Request] = deque()
        self._ledger = StatsWindow()

    @property
    def full(self) -> bool:
        """Whether the line is so long that nobody else may join it."""
        return len(self.waiting) >= self._most_waiting > 0

    @property
    def counts(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        return len(self.running), len(self.waiting)

    def start(self, kv_tokens: int) -> Iterator[Request]:
        """Those whose turn has come, one by one; each of them counts as running at once.

        `kv_tokens` is what the target's KV may hold, 0 for any number. A request is given
        room for the longest answer that it may get, so none has to be interrupted later;
        alone it always fits, since its context is limited to that much.
        """
        while self.waiting and len(self.running) < self._most:
            answer = self.waiting[0]
            taken = sum(other.most_tokens for other in self.running.values())
            if self.running and 0 < kv_tokens < taken + answer.most_tokens:
                return
            self.waiting.popleft()
            self.running[answer.sequence.number] = answer
            yield answer

    def of(self, peer: bytes, request: int) -> Request | None:
        """A client's request, if it is not over."""
        return next((a for a in self if (a.peer, a.request) == (peer, request)), None)

    def drop(self, answer: Request) -> None:
        """The request is over."""
        self._ledger.end(answer.sequence.recorder)
        self.running.pop(answer.sequence.number, None)
        if answer in self.waiting:
            self.waiting.remove(answer)

    def count(self, now: float) -> None:
        """Keep the books of the last seconds; call at every wake-up."""
        if self._ledger.wake(now, busy=bool(self.running)):
            self._ledger.sample(now, self._recorders())

    def recent(self, now: float) -> WindowStats:
        """What all requests did in the last seconds."""
        return self._ledger.recent(now, self._recorders())

    def _recorders(self) -> Iterator[Recorder]:
        return (answer.sequence.recorder for answer in self.running.values())

    def __iter__(self) -> Iterator[Request]:
        return iter([*self.running.values(), *self.waiting])
