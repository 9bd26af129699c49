"""Starts requests, and puts others aside until their next turn."""

from orchestrator.executor import Executor
from orchestrator.requests.queue import RequestQueue
from orchestrator.requests.request import Request

_MOST_CHANGES = 64
"""Changes per call, so that other messages are read in between."""


class Rotation:
    """Executes the queue's decisions."""

    def __init__(self, requests: RequestQueue, executor: Executor) -> None:
        self._requests = requests
        self._executor = executor

    def advance(self, kv_tokens: int, now: float) -> None:
        """Start the requests whose turn has come; have others make room if that is fair.

        Args:
            kv_tokens: KV capacity of the target (`RequestQueue.start`).
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
        """Record that a request has decoded; hold it if its place now belongs to another."""
        if not self._requests.on_tokens(request, now):
            self._hold(request)

    def _hold(self, request: Request) -> None:
        """Put a request aside; its KV stays where it is."""
        self._executor.run(request, request.sequence.hold)
        if not request.is_over:
            self._requests.hold(request)

    def _evict(self, request: Request) -> None:
        """Free the memory of a waiting request; the services keep its KV while they can."""
        self._executor.run(request, request.suspend)
        if not request.is_over:
            self._requests.evict(request)
