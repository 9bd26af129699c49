"""The bytes of a vocabulary entry."""

import re

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's byte tokens


def token_bytes(entry: str, *, byte_level: bool) -> bytes:
    """Return the bytes of a vocabulary entry.

    Args:
        entry: the entry in the tokenizer's spelling.
        byte_level: the entry is spelled in GPT-2's alphabet of bytes, not in characters.
    """
    if byte_level:
        values = [_BYTES.get(character) for character in entry]
        # Added tokens are spelled literally.
        return entry.encode() if None in values else bytes(b for b in values if b is not None)
    if match := _BYTE.fullmatch(entry):
        return bytes([int(match[1], 16)])
    return entry.replace(_SPACE, " ").encode()


def _alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable characters are themselves, other bytes start at 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTES = _alphabet()
