"""Listen for hosts of a draft server: one at a time, over CURVE.

It is the `Connection` of a service. A host sends Identify and is then served until it sends a stop,
disconnects, or stays silent for too long. Other hosts are refused meanwhile.
"""

import logging
import time
from collections.abc import Callable, Sequence

from protocol.errors import DeadlineExceeded, ProtocolError, StreamEnded
from protocol.messages import FromService, Heartbeat, Identify, Rejected, ToDrafter, ToService
from protocol.process.closeable import Closeable
from protocol.process.deadline import Deadline
from protocol.transport.channel import STRANGER_BYTES, Hub
from protocol.transport.codec import Decoder
from protocol.transport.curve import KeyPair, ServerLock

_log = logging.getLogger(__name__)

_SILENCE_S = 5.0
"""A host answers a heartbeat every second; it is dropped after this long without a message."""
_BUSY = "this draft server is serving another host; start another one, or try again later"
_FIRST_S = 60.0
"""Longest silence before its first message, as its orchestrator may still be starting."""
_LOOK_S = 1.0


class HostListener(Closeable):
    """The listening end; raises UsageError if the address cannot be used."""

    def __init__(
        self,
        address: str,
        keys: KeyPair,
        trusted: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        lock = ServerLock(keys, frozenset(trusted))
        self._hub: Hub[ToService] = Hub(
            address, Decoder(ToDrafter), lock, stranger_bytes=STRANGER_BYTES
        )
        self._clock = clock
        self._host: bytes | None = None
        self._newcomer: bytes | None = None
        """A host that connected after the current one had gone."""
        self._heard = 0.0
        self._timeout_s = _FIRST_S
        self._next: ToService | ProtocolError | None = None

    @property
    def address(self) -> str:
        """The listening address, with the port that the system chose if it was 0."""
        return self._hub.bound_to

    def await_host(self) -> None:
        """Wait for a host; only signals end the wait early."""
        while self._host is None:
            if self._hub.ready(_LOOK_S):
                self._look()

    def dismiss(self, reason: str) -> None:
        """Stop serving this host."""
        if self._host is not None:
            self._hub.send(self._host, Rejected(reason))
        self._host, self._next = self._newcomer, None
        self._newcomer, self._heard, self._timeout_s = None, self._clock(), _FIRST_S

    def send(self, message: FromService) -> None:
        """Queue a message to the host; raises StreamEnded if it is gone."""
        if self._host is None or not self._hub.send(self._host, message):
            raise StreamEnded("the host has gone")

    def ready(self, timeout_s: float) -> bool:
        """Return True if a message from the host is waiting, after at most `timeout_s` seconds.

        Raises:
            StreamEnded: the host has been silent for too long.
        """
        deadline = Deadline(timeout_s)
        while self._next is None and self._newcomer is None:
            if self._hub.ready(0.0) or self._hub.ready(deadline.remaining):
                self._look()
            elif deadline.passed:
                break
        if self._newcomer is not None:
            raise StreamEnded("the host has gone")
        if self._next is None and self._clock() - self._heard > self._timeout_s:
            raise StreamEnded(f"the host has been silent for {self._timeout_s:g} s")
        return self._next is not None

    def await_news(self, timeout_s: float) -> bool:
        """Wait for a message, as `ready` does; for another host see `await_host`."""
        return self.ready(timeout_s)

    def receive(self, timeout_s: float, what: str) -> ToService:
        """Return the next message.

        Raises:
            DeadlineExceeded: nothing arrived in time.
            ProtocolError: the message is not one to a drafter.
        """
        if not self.ready(timeout_s) or self._next is None:
            raise DeadlineExceeded(f"no {what} within {timeout_s:g} s")
        message, self._next = self._next, None
        if isinstance(message, ProtocolError):
            raise message
        return message

    def _look(self) -> None:
        """Read one message from any host."""
        received = self._hub.receive()
        if received is None:
            return
        peer, message = received
        if peer == self._host:
            self._heard, self._timeout_s = self._clock(), _SILENCE_S
            self._next = message
        elif isinstance(message, Identify) and self._host is None:
            self._hub.accept(peer)
            self._host, self._heard, self._timeout_s = peer, self._clock(), _FIRST_S
        elif isinstance(message, Identify) and not self._hub.send(self._host or b"", Heartbeat()):
            self._newcomer = peer
            self._hub.accept(peer)
        elif isinstance(message, Identify):
            _log.info("another host was turned away")
            self._hub.send(peer, Rejected(_BUSY))

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._hub.close()
