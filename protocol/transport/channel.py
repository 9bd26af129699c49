"""Sockets with deadlines. Only this module, `curve.py` and `async_client.py` import zmq.

The orchestrator binds a `Hub` for its services and one for its clients; all other processes connect
a `Channel`. A Hub identifies its peers by opaque `peer` bytes. Sends never block: a peer that has
stopped reading loses messages once its queue is full, and the send reports it. Nothing crosses a
network unencrypted: an address that is not a Unix socket needs a `Lock`, the keys of CURVE.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import zmq

from protocol.errors import (
    DeadlineExceeded,
    ProtocolError,
    RuntimeFailure,
    StreamEnded,
    UsageError,
)
from protocol.messages import Message
from protocol.process.closeable import Closeable
from protocol.transport.address import IPC
from protocol.transport.codec import MAX_MESSAGE_BYTES, Decoder, encode

if TYPE_CHECKING:
    from protocol.transport.curve import ClientLock, Lock, ServerLock

Inbound = TypeVar("Inbound", bound=Message)

_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000
_RECONNECT_MS = 20
"""Interval between attempts to connect a missing local socket; an attempt is almost free."""
STRANGER_BYTES = 64 * 1024
"""Largest message of a peer before its handshake."""
_QUEUE = 1000
"""Queued messages per peer; further ones are dropped."""
_LOOK_S = 1.0
"""Interval between two checks that a bound socket still has its file."""

# Combining zmq's flags is slow enough to be measurable between two verifications.
_READABLE = int(zmq.POLLIN)
_NOW = int(zmq.NOBLOCK)
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def configure(socket: zmq.Socket[bytes], address: str, *, locked: bool = False) -> None:
    """Set the options of every socket; raise UsageError for a network address without a lock."""
    if not locked and not address.startswith(IPC):
        raise UsageError(f"{address!r} is not a Unix socket: it needs keys (`ssd keys`)")
    socket.linger = 200  # ms; a dying process must not hang on unread messages
    socket.sndhwm = socket.rcvhwm = _QUEUE
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    if address.startswith(IPC):
        return  # no pings: the kernel closes a dead process's sockets (not a stopped one's)
    # A network may lose a peer silently. zmq's ping runs in its I/O thread, also during
    # computation.
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS


class _Endpoint(Closeable):
    """The base of Hub and Channel: a socket and its context, which are closed together."""

    def __init__(self, kind: int, address: str, lock: "Lock | None" = None) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        try:
            configure(self._socket, address, locked=lock is not None)
        except UsageError:
            self._context.destroy()
            raise
        self._authenticator = None
        if lock is not None:
            from protocol.transport.curve import secure  # noqa: PLC0415

            self._authenticator = secure(self._socket, self._context, lock)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket, for polling."""
        return self._socket

    def ready(self, timeout_s: float) -> bool:
        """Return True if a message is waiting, after at most `timeout_s` seconds."""
        # Polling takes several times longer than asking, which happens around every verification.
        if int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
            return True
        return timeout_s > 0.0 and bool(self._socket.poll(round(timeout_s * 1000)))

    def close(self) -> None:
        """Close the socket and its context; safe to call twice."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._socket.close()
        self._context.term()


class Channel(_Endpoint, Generic[Inbound]):
    """One connection to a Hub.

    Args:
        address: address of the Hub.
        decoder: decoder of its messages.
        lock: keys for a network connection.
        send_timeout_s: longest wait of a send for a peer that reads slowly.
    """

    def __init__(
        self,
        address: str,
        decoder: Decoder[Inbound],
        lock: "ClientLock | None" = None,
        *,
        send_timeout_s: float = 0.0,
    ) -> None:
        super().__init__(zmq.DEALER, address, lock)
        self._socket.sndtimeo = round(1e3 * send_timeout_s)
        self._decoder = decoder
        self._monitor = self._socket.get_monitor_socket() if lock is not None else None
        self._news: zmq.Socket[bytes] | None = None
        """Monitor of connections, created on demand."""
        self._both = zmq.Poller()
        if lock is None:
            self._socket.reconnect_ivl = _RECONNECT_MS
        _at(address, self._socket.connect)

    def await_news(self, timeout_s: float) -> bool:
        """Wait like `ready`, but return False at once on a new connection: the peer may be new.

        Waiting messages come first. The first call may report the first connection.
        """
        if self._news is None:
            self._news = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self._both.register(self._socket, zmq.POLLIN)
            self._both.register(self._news, zmq.POLLIN)
        if self._socket in dict(self._both.poll(max(0, round(timeout_s * 1000)))):
            return True  # further messages remain unread
        while self._news.poll(0):
            self._news.recv_multipart()
        return False

    def check(self) -> None:
        """Raise StreamEnded, with the reason, if a network connection is down."""
        if self._monitor is None:
            return
        from protocol.transport.curve import poll_failure  # noqa: PLC0415

        if (reason := poll_failure(self._monitor)) is not None:
            raise StreamEnded(reason)

    def send(self, message: Message) -> None:
        """Queue a message; raise RuntimeFailure if the peer no longer reads."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Queue an encoded message."""
        try:
            self._socket.send(data)
        except zmq.Again as error:
            raise RuntimeFailure("the orchestrator has stopped reading its messages") from error

    def receive(self, timeout_s: float, what: str) -> Inbound:
        """Return the next message.

        Raises:
            DeadlineExceeded: nothing arrived within `timeout_s` seconds; `what` names the
                expected message.
            ProtocolError: the received bytes are not a message for this end.
        """
        if not self.ready(timeout_s):
            raise DeadlineExceeded(f"no {what} within {timeout_s:g} s")
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._monitor = None
        if self._news is not None:
            self._socket.disable_monitor()
            self._news.close()
            self._news = None
        super().close()


class Hub(_Endpoint, Generic[Inbound]):
    """The bound end: many peers, identified by `peer` bytes."""

    def __init__(
        self,
        address: str,
        decoder: Decoder[Inbound],
        lock: "ServerLock | None" = None,
        *,
        stranger_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Bind the socket; `stranger_bytes` limits messages of peers not accepted yet."""
        super().__init__(zmq.ROUTER, address, lock)
        self._decoder = decoder
        self._stranger_bytes = stranger_bytes
        self._accepted: set[bytes] = set()
        # Sending to a peer that is gone must be an error, not a silent drop.
        self._socket.router_mandatory = True
        self._address = address
        self._looked = 0.0
        self.dropped = 0
        """Messages dropped because the peer is gone or does not read."""
        self.limit_of: Callable[[bytes], int] = lambda _: MAX_MESSAGE_BYTES
        """Longest message of a peer, in bytes; a longer one is not decoded."""
        _at(address, self._socket.bind)

    @property
    def bound_to(self) -> str:
        """The address, with the port that the system chose if it was 0."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def keep_bound(self, now: float) -> None:
        """Bind again if the socket's file was deleted; connections are not affected.

        Call it often: it checks once a second of `now`.
        """
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        path = self._address.removeprefix(IPC)
        if path != self._address and not Path(path).exists() and Path(path).parent.exists():
            with contextlib.suppress(zmq.ZMQError):  # the folder has just gone: retry later
                self._socket.bind(self._address)

    def accept(self, peer: bytes) -> None:
        """Accept a peer after its handshake: its messages may be large from now on."""
        self._accepted.add(peer)

    def send(self, peer: bytes, message: Message | bytes) -> bool:
        """Queue a message, which may be encoded already.

        Returns:
            False if the peer is gone or no longer reads.
        """
        frame = message if isinstance(message, bytes) else encode(message)
        try:
            self._socket.send(peer, _NOW_AND_MORE)
            self._socket.send(frame, _NOW)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                self.dropped += 1
                return False
            raise
        return True

    def receive(self) -> tuple[bytes, Inbound | ProtocolError] | None:
        """Return the next waiting (peer, message), or None; an error replaces an invalid one."""
        try:
            peer = self._socket.recv(_NOW)
        except zmq.Again:
            return None
        # The parts of a message arrive together.
        more = self._socket.getsockopt(zmq.RCVMORE)
        frame = self._socket.recv() if more else b""
        if self._socket.getsockopt(zmq.RCVMORE):
            return peer, self._too_many()
        if len(frame) > self._stranger_bytes and peer not in self._accepted:
            return peer, ProtocolError(
                f"a message of {len(frame)} bytes before the handshake exceeds the limit of "
                f"{self._stranger_bytes}"
            )
        if len(frame) > (limit := self.limit_of(peer)):
            return peer, ProtocolError(
                f"a message of {len(frame)} bytes exceeds the limit of {limit} for its sender"
            )
        try:
            return peer, self._decoder.decode(frame)
        except ProtocolError as error:
            return peer, error

    def _too_many(self) -> ProtocolError:
        rest = self._socket.recv_multipart()
        return ProtocolError(f"expected one frame, got {1 + len(rest)}")


def _at(address: str, attach: Callable[[str], object]) -> None:
    """Bind or connect; raise UsageError if a network address cannot be used."""
    try:
        attach(address)
    except zmq.ZMQError as error:
        if address.startswith(IPC):
            raise
        raise UsageError(f"the address {address!r} cannot be used: {error}") from error


class Poller:
    """Waits for several endpoints, and for other programs' pipes."""

    def __init__(self, endpoints: Sequence[_Endpoint]) -> None:
        self._poller = zmq.Poller()
        for endpoint in endpoints:
            self.add(endpoint)

    def add(self, endpoint: _Endpoint) -> None:
        """Add an endpoint; adding it again changes nothing."""
        self._poller.register(endpoint.socket, zmq.POLLIN)

    def add_reader(self, descriptor: int) -> None:
        """Also wait until a file descriptor is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def set_writer(self, descriptor: int, *, enabled: bool) -> None:
        """Start or stop waiting until a file descriptor is writable."""
        self._poller.register(descriptor, zmq.POLLOUT if enabled else 0)

    def wait(self, timeout_s: float) -> None:
        """Return once something is ready, or after `timeout_s` seconds."""
        self._poller.poll(max(0, round(timeout_s * 1000)))
