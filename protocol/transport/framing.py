"""Messages in a stream of bytes: msgpack values, one after the other, are their own frames.

Only the ends of values are looked for here, by the msgpack package, whose unpacker can skip a
value that has not arrived as a whole; msgspec reads whole messages only. What is inside is left
to `codec.py`, so that a hostile stream makes us build nothing before sizes and types are checked.
"""

import msgpack

from protocol.errors import ProtocolError
from protocol.transport.codec import MAX_MESSAGE_BYTES


class FrameReader:
    """Cuts a stream into the bytes of its msgpack values."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._unpacker = msgpack.Unpacker(max_buffer_size=max_bytes)
        self._bytes = bytearray()
        """What was fed and not yet cut off."""
        self._start = 0
        """Place in the stream of its first byte."""

    def feed(self, data: bytes) -> None:
        """Add what was read; raises ProtocolError if no message can be that long."""
        try:
            self._unpacker.feed(data)
        except msgpack.BufferFull as error:
            raise self._too_long() from error
        self._bytes += data

    def cut(self) -> bytes | None:
        """The next whole value, or None if it has not arrived yet.

        Raises:
            ProtocolError: this is no msgpack, or too long or nested too deeply; nothing
                after it can be understood.
        """
        try:
            self._unpacker.skip()
        except msgpack.OutOfData:
            if len(self._bytes) > self._max_bytes:
                raise self._too_long() from None
            return None
        # Its errors of format, nesting and size share no other base.
        except ValueError as error:
            raise ProtocolError(f"the stream is no msgpack ({error or 'bad byte'})") from error
        length = self._unpacker.tell() - self._start
        frame = bytes(self._bytes[:length])
        del self._bytes[:length]
        self._start += length
        return frame

    @property
    def inside(self) -> bool:
        """True if a message has begun and not ended."""
        return bool(self._bytes)

    def _too_long(self) -> ProtocolError:
        return ProtocolError(f"a message exceeds the limit of {self._max_bytes} bytes")
