"""Message encoding: msgpack on the wire, through msgspec.

Decoding is strict and bounded: size, nesting, types, ranges, unknown fields and the lengths of
lists are checked while the bytes are read, and a length is checked before memory is allocated for
it. Every failure is a ProtocolError that describes the error.
"""

from typing import Any, Generic, TypeVar, get_args

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import Message

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

M = TypeVar("M", bound=Message)

_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the msgpack map of a message, its tag under `type`."""
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
        """Decode a message.

        Raises:
            ProtocolError: it is too large, not msgpack, not of the union, or has an invalid
                field.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}"
            )
        try:
            message: M = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            names = ", ".join(self._names)
            raise ProtocolError(
                f"{len(data)} bytes are no message that is valid here ({error}); known: {names}"
            ) from error
        return message
