"""A draft server on another machine, as a relay's peer: messages over CURVE.

A lost connection is not restored here: this process ends, and its successor starts afresh, as does
the server.
"""

from pathlib import Path

from protocol.errors import DeadlineExceeded, ProtocolError, RuntimeFailure, StreamEnded
from protocol.messages import FromDrafter, FromDraftServer, Identify, Rejected, ToService
from protocol.process.closeable import Closeable
from protocol.process.deadline import Deadline
from protocol.settings import DrafterSettings
from protocol.transport.channel import Channel, Poller
from protocol.transport.codec import Decoder
from protocol.transport.curve import ClientLock, read_keys

_LOOK_S = 0.2


class TcpPeer(Closeable):
    """Draft server over CURVE; raises UsageError if keys or address are not usable."""

    backend = "remote"

    def __init__(self, settings: DrafterSettings) -> None:
        self._address = settings.server
        lock = ClientLock(read_keys(Path(settings.key_file)), settings.server_key)
        self._channel: Channel[FromDraftServer] = Channel(
            settings.server, Decoder(FromDraftServer), lock
        )
        self._channel.send(Identify())

    @property
    def name(self) -> str:
        """Name of the server in errors."""
        return f"the draft server {self._address}"

    def last_words(self, reason: str) -> str:
        """Return the reason for the connection's end, as nothing else is known."""
        return f"{self.name}: {reason}"

    def watch(self, poller: Poller) -> None:
        """Wait for its messages."""
        poller.add(self._channel)

    def ready(self, timeout_s: float) -> bool:
        """Return True if a message is waiting, even if the connection has ended since."""
        deadline = Deadline(timeout_s)
        while not self._channel.ready(min(_LOOK_S, deadline.remaining)):
            self._channel.check()
            if deadline.passed:
                return False
        return True

    def receive(self, timeout_s: float, what: str) -> FromDrafter:
        """Return the next message."""
        if not self.ready(timeout_s):
            raise DeadlineExceeded(f"no {what} within {timeout_s:g} s")
        message = self._channel.receive(0.0, what)
        if isinstance(message, Rejected):
            raise StreamEnded(message.reason)
        return message

    def post(self, message: ToService) -> None:
        """Queue a message."""
        try:
            self._channel.send(message)
        except RuntimeFailure as error:
            raise ProtocolError("it does not read its input") from error

    def flush(self) -> None:
        """Do nothing: zmq sends by itself."""

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        self._channel.close()
