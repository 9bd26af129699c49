"""Messages to bytes and back: msgpack on the wire, written and read by msgspec.

Decoding is strict and bounded: size, nesting, types, ranges, unknown fields and the lengths
of lists are checked while the bytes are read, a length before room is made for it. Every
failure is a ProtocolError that says what was wrong.
"""

from typing import Any, Generic, TypeVar, get_args

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import Message

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

M = TypeVar("M", bound=Message)

_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The msgpack map of a message, its tag under `type`."""
    return _ENCODER.encode(message)


class Decoder(Generic[M]):
    """Decodes one direction: the members of one union of message types."""

    def __init__(self, union: Any) -> None:
        self._union = union
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._names = sorted(
            str(msgspec.inspect.type_info(member).tag)  # type: ignore[attr-defined]  # StructType has it
            for member in get_args(union) or (union,)
        )

    def decode(self, data: bytes) -> M:
        """The message in `data`.

        Raises:
            ProtocolError: too large, not msgpack, not one of the union, or a field is wrong.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}"
            )
        try:
            message: M = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            known = ", ".join(self._names)
            raise ProtocolError(
                f"{len(data)} bytes are no message that is valid here ({error}); known: {known}"
            ) from error
        return message
