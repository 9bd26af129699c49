"""Messages over a pair of file descriptors: a program's standard input and output.

The methods are those of a `Channel`, so that a service need not distinguish them. Neither
descriptor is made non-blocking, as that would change it for every process that shares it; a
descriptor that poll() reports as ready takes `select.PIPE_BUF` bytes without blocking.
"""

import os
import select
from typing import Generic, NamedTuple, TypeVar

from protocol.errors import DeadlineExceeded, ProtocolError, RuntimeFailure, StreamEnded
from protocol.messages import Message
from protocol.process.deadline import Deadline
from protocol.transport.codec import Decoder, encode
from protocol.transport.framing import FrameReader

Inbound = TypeVar("Inbound", bound=Message)

READ_BYTES = 1 << 16
_WRITE_S = 30.0
"""A peer that reads nothing for this long counts as hung."""


class Pipes(NamedTuple):
    """The descriptors for communication with the parent process."""

    reading: int
    writing: int


def take_pipes() -> Pipes:
    """Reserve standard input and output for the protocol.

    From now on, libraries print to standard error, and nothing else reads the input.
    """
    pipes = Pipes(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return pipes


class PipeChannel(Generic[Inbound]):
    """One connection to the program at the other end of two pipes."""

    def __init__(self, reading: int, writing: int, decoder: Decoder[Inbound]) -> None:
        self._reading, self._writing = reading, writing
        self._decoder = decoder
        self._frames = FrameReader()
        self._next: bytes | None = None

    def send(self, message: Message, timeout_s: float = _WRITE_S) -> None:
        """Write a message.

        Raises:
            DeadlineExceeded: the peer no longer reads.
            StreamEnded: the peer has closed its end.
        """
        write_all(self._writing, encode(message), "reader of our messages", timeout_s)

    def ready(self, timeout_s: float) -> bool:
        """Return True if a message is waiting, after at most `timeout_s` seconds.

        Raises:
            StreamEnded: the stream has ended.
            ProtocolError: the stream is broken.
        """
        deadline = Deadline(timeout_s)
        while self._next is None:
            self._next = self._frames.cut()
            if self._next is None:
                if not readable(self._reading, deadline.remaining):
                    if not deadline.passed:
                        continue  # this process itself was suspended
                    return False
                self._fill()
        return True

    def await_news(self, timeout_s: float) -> bool:
        """Wait for a message, like `ready`: a pipe never reconnects."""
        return self.ready(timeout_s)

    def receive(self, timeout_s: float, what: str) -> Inbound:
        """Return the next message; errors as for `Channel.receive` and `ready`."""
        if not self.ready(timeout_s) or self._next is None:
            raise DeadlineExceeded(f"no {what} within {timeout_s:g} s")
        frame, self._next = self._next, None
        return self._decoder.decode(frame)

    def _fill(self) -> None:
        data = os.read(self._reading, READ_BYTES)
        if not data:
            if self._frames.inside:
                raise ProtocolError("the stream ended inside a message")
            raise StreamEnded("the stream has ended")
        self._frames.feed(data)


def readable(descriptor: int, timeout_s: float) -> bool:
    """Return True if reading will not block, after at most `timeout_s` seconds."""
    return _poll(descriptor, select.POLLIN, timeout_s)


def writable(descriptor: int, timeout_s: float) -> bool:
    """Return True if `write_some` will not block, after at most `timeout_s` seconds."""
    return _poll(descriptor, select.POLLOUT, timeout_s)


def write_all(descriptor: int, data: bytes, who: str, timeout_s: float = _WRITE_S) -> None:
    """Write everything; `who` names the reader in errors, which are those of `PipeChannel.send`."""
    deadline = Deadline(timeout_s)
    rest = memoryview(data)
    while rest:
        if not writable(descriptor, deadline.remaining):
            if not deadline.passed:
                continue  # this process itself was suspended
            raise DeadlineExceeded(f"no {who} within {timeout_s:g} s")
        rest = rest[write_some(descriptor, rest) :]


def write_some(descriptor: int, data: memoryview | bytes | bytearray) -> int:
    """Write as much as a ready descriptor takes without blocking; return the number of bytes."""
    try:
        return os.write(descriptor, data[: select.PIPE_BUF])
    except BrokenPipeError as error:
        raise StreamEnded("the stream is no longer read") from error
    except OSError as error:
        raise RuntimeFailure(f"the stream cannot be written: {error}") from error


def _poll(descriptor: int, event: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0, round(timeout_s * 1000))))
