"""A program on pipes, as a relay's peer."""

from protocol.errors import ProtocolError
from protocol.messages import Features, FromDrafter, ToService
from protocol.transport.channel import Poller
from protocol.transport.codec import MAX_MESSAGE_BYTES, Decoder, encode
from protocol.transport.pipes import PipeChannel, writable, write_some
from services.drafter.relay.process import DrafterProcess

_MOST_STATES = MAX_MESSAGE_BYTES // 2
"""Unread bytes beyond which the target's states are not sent to a program."""


class StdioPeer:
    """Drafting program on standard input and output."""

    backend = "stdio"

    def __init__(self, program: DrafterProcess) -> None:
        self._program = program
        self._stream: PipeChannel[FromDrafter] = PipeChannel(
            program.reading, program.writing, Decoder(FromDrafter)
        )
        self._unsent = bytearray()
        """Bytes that the program has not read yet."""

    @property
    def name(self) -> str:
        """Name of the program in errors."""
        return f"the draft command {self._program.name!r}"

    def last_words(self, reason: str) -> str:
        """Return how the program ended, which says more than the end of its pipe."""
        del reason
        return self._program.last_words()

    def watch(self, poller: Poller) -> None:
        """Wait for its output, and until it reads if data is queued for it."""
        poller.add_reader(self._program.reading)
        poller.set_writer(self._program.writing, enabled=bool(self._unsent))

    def ready(self, timeout_s: float) -> bool:
        """Return True if a message is waiting."""
        return self._stream.ready(timeout_s)

    def receive(self, timeout_s: float, what: str) -> FromDrafter:
        """Return the next message."""
        return self._stream.receive(timeout_s, what)

    def post(self, message: ToService) -> None:
        """Queue a message; states of the target are dropped if much is queued already."""
        if isinstance(message, Features) and len(self._unsent) > _MOST_STATES:
            return
        self._unsent += encode(message)
        if len(self._unsent) > MAX_MESSAGE_BYTES:
            raise ProtocolError("it does not read its input")

    def flush(self) -> None:
        """Write as much as its pipe takes."""
        while self._unsent and writable(self._program.writing, 0.0):
            del self._unsent[: write_some(self._program.writing, self._unsent)]
