"""Starts requests, and puts others aside until their next turn."""

from orchestrator.executor import Executor
from orchestrator.requests.queue import RequestQueue
from orchestrator.requests.request import Request

_MOST_CHANGES = 64
"""At once, so that other messages are read in between."""


class Rotation:
    """Carries out what the queue decides."""

    def __init__(self, requests: RequestQueue, executor: Executor) -> None:
        self._requests = requests
        self._executor = executor

    def advance(self, kv_tokens: int, now: float) -> None:
        """Start the requests whose turn has come, and have others make room where that is fair.

        Args:
            kv_tokens: what the target's KV may hold (`RequestQueue.start`).
            now: the time.
        """
        for _ in range(_MOST_CHANGES):
            for request in self._requests.start(kv_tokens, now):
                self._executor.run(request, request.sequence.release)
            if (useless := self._requests.find_useless(kv_tokens)) is not None:
                self._evict(useless)
            elif (victim := self._requests.find_victim(kv_tokens, now)) is None:
                return
            elif not self._requests.park(victim):
                self._hold(victim)

    def on_tokens(self, request: Request, now: float) -> None:
        """It has decoded something; if its place is another's by now, it waits."""
        if not self._requests.begin(request, now):
            self._hold(request)

    def _hold(self, request: Request) -> None:
        """Put a request aside; its KV stays where it is."""
        self._executor.run(request, request.sequence.hold)
        if not request.is_over:
            self._requests.hold(request)

    def _evict(self, request: Request) -> None:
        """Take its memory from a request that waits; the services keep its KV while they can."""
        self._executor.run(request, request.suspend)
        if not request.is_over:
            self._requests.evict(request)
