"""The running requests, and those that wait for their turn and for memory."""

from collections.abc import Iterable, Iterator

from orchestrator.requests.fair_shares import Claim, FairShares
from orchestrator.requests.request import Request
from orchestrator.telemetry.recorder import Recorder
from orchestrator.telemetry.window_stats import StatsWindow
from protocol.messages import WindowStats

_MOST_ANSWERS = 16
"""Waiting sequences per allowed request; those of one request count as one."""


class RequestQueue:
    """Requests in line; `fair_shares` decides the order of places and of memory.

    Background requests are overtaken by all others.
    """

    def __init__(self, most: int, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self.running: dict[int, Request] = {}
        """Requests that the services know by sequence number, including held ones."""
        self._held: dict[int, Request] = {}
        """Running requests that wait for their next turn, the last one last."""
        self.waiting: dict[int, Request] = {}
        self._shares = FairShares(most)
        self._window = StatsWindow()

    def add(self, request: Request) -> None:
        """Put a request in line."""
        self.waiting[request.sequence.number] = request
        self._shares.add(_claim_of(request))

    def is_full(self, arriving: Iterable[tuple[str, int]], asking: tuple[str, int]) -> bool:
        """Return True if the queue is full.

        Args:
            arriving: client and group of other requests that are about to enter the queue.
            own: client and group of the new request.
        """
        most = self._most_waiting
        if not most:
            return False
        waiting = [*self.waiting.values(), *self._held.values()]
        others = [*arriving, *((request.client, request.group) for request in waiting)]
        full = len(others) >= _MOST_ANSWERS * most
        return full or len({*others} - {asking}) >= most

    @property
    def counts(self) -> tuple[int, int]:
        """Number of running and of waiting requests."""
        held = len(self._held)
        return len(self.running) - held, len(self.waiting) + held

    def start(self, kv_tokens: int, now: float) -> Iterator[Request]:
        """Start the requests whose turn has come, one by one; each counts as running at once.

        `kv_tokens` is the KV capacity of the target, 0 for unlimited. A request reserves room for
        its longest possible answer, so none runs out of it later; alone it always fits, since its
        context is limited to that capacity.
        """
        while self._shares.has_place and (request := self._find_next()) is not None:
            if not self._fits(request, kv_tokens):
                return
            number = request.sequence.number
            self._shares.grant(_claim_of(request), now)
            self._held.pop(number, None)
            self.waiting.pop(number, None)
            self.running[number] = request
            yield request

    def find_useless(self, kv_tokens: int) -> Request | None:
        """Return a waiting request whose memory the next one needs."""
        request = self._find_next()
        if request is None or self._fits(request, kv_tokens) or not self._held:
            return None
        return self._held[next(reversed(self._held))]

    def find_victim(self, kv_tokens: int, now: float) -> Request | None:
        """Return the running request that has to make room for the next one, or None."""
        request = self._find_next()
        if request is None or (self._shares.has_place and self._fits(request, kv_tokens)):
            return None
        victim = self._shares.find_victim(now)
        return self.running[victim.number] if victim is not None else None

    def _find_next(self) -> Request | None:
        claim = self._shares.find_next()
        if claim is None:
            return None
        return self._held.get(claim.number) or self.waiting[claim.number]

    def _fits(self, request: Request, kv_tokens: int) -> bool:
        """Return True if it fits together with all requests that the services know."""
        others = [other.most_tokens for other in self.running.values() if other is not request]
        return not others or not 0 < kv_tokens < sum(others) + request.most_tokens

    @property
    def has_waiting(self) -> bool:
        """True if any request waits for its turn."""
        return bool(self.waiting or self._held)

    def on_tokens(self, request: Request, now: float) -> bool:
        """Record that it has decoded; return False if it has to wait now (`hold`)."""
        return self._shares.on_tokens(request.sequence.number, now)

    def park(self, request: Request) -> bool:
        """Let it compute its prompt without a place; return False if it has to wait (`hold`)."""
        return self._shares.park(_claim_of(request))

    def hold(self, request: Request) -> None:
        """Make it wait for its next turn; it keeps its memory."""
        self._held[request.sequence.number] = request
        self._shares.give_up(_claim_of(request))

    def evict(self, request: Request) -> None:
        """Make it wait without memory."""
        number = request.sequence.number
        del self._held[number]
        self.waiting[number] = self.running.pop(number)

    def find(self, peer: bytes, number: int) -> Request | None:
        """Return a client's request by the client's number, if it is not over."""
        return next((r for r in self if (r.peer, r.number) == (peer, number)), None)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended."""
        self._window.end(request.sequence.recorder)
        self.running.pop(request.sequence.number, None)
        self._held.pop(request.sequence.number, None)
        self.waiting.pop(request.sequence.number, None)
        self._shares.remove(_claim_of(request))

    def update_window(self, now: float) -> None:
        """Update the statistics of the last seconds; call at every wake-up."""
        if self._window.wake(now, busy=bool(self.running)):
            self._window.sample(now, self._recorders())

    def recent(self, now: float) -> WindowStats:
        """Return the statistics of all requests in the last seconds."""
        return self._window.recent(now, self._recorders())

    def _recorders(self) -> Iterator[Recorder]:
        return (request.sequence.recorder for request in self.running.values())

    def __iter__(self) -> Iterator[Request]:
        return iter([*self.running.values(), *self.waiting.values()])


def _claim_of(request: Request) -> Claim:
    client = (request.is_background, request.client)
    return Claim(request.sequence.number, client, request.group)
