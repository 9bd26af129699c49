"""Framing of messages in a byte stream: msgpack values delimit themselves.

Only the ends of values are found here, by the msgpack package, whose unpacker can skip a value that
has not arrived completely; msgspec reads whole messages only. The content is left to `codec.py`, so
that nothing is built from a hostile stream before sizes and types are checked.
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
        """Bytes that were fed and not cut off yet."""
        self._start = 0
        """Position of its first byte in the stream."""

    def feed(self, data: bytes) -> None:
        """Add received bytes; raise ProtocolError if the message is too long."""
        try:
            self._unpacker.feed(data)
        except msgpack.BufferFull as error:
            raise self._too_long() from error
        self._bytes += data

    def cut(self) -> bytes | None:
        """Return the next whole value, or None if it has not arrived yet.

        Raises:
            ProtocolError: the bytes are not msgpack, too long or nested too deeply; the rest of
                the stream is unusable.
        """
        try:
            self._unpacker.skip()
        except msgpack.OutOfData:
            if len(self._bytes) > self._max_bytes:
                raise self._too_long() from None
            return None
        # Its errors of format, nesting and size share no other base class.
        except ValueError as error:
            raise ProtocolError(f"the stream is no msgpack ({error or 'bad byte'})") from error
        length = self._unpacker.tell() - self._start
        frame = bytes(self._bytes[:length])
        del self._bytes[:length]
        self._start += length
        return frame

    @property
    def inside(self) -> bool:
        """True within an incomplete message."""
        return bool(self._bytes)

    def _too_long(self) -> ProtocolError:
        return ProtocolError(f"a message exceeds the limit of {self._max_bytes} bytes")
