"""The bytes that a token stands for, from its entry in the vocabulary."""

import re

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's


def token_bytes(entry: str, *, byte_level: bool) -> bytes:
    """The bytes of a vocabulary's entry.

    Args:
        entry: as the tokenizer spells it.
        byte_level: the alphabet stands for bytes (GPT-2's), not for characters.
    """
    if byte_level:
        known = [_BYTES.get(character) for character in entry]
        # Added tokens are spelt as they are.
        return entry.encode() if None in known else bytes(b for b in known if b is not None)
    if found := _BYTE.fullmatch(entry):
        return bytes([int(found[1], 16)])
    return entry.replace(_SPACE, " ").encode()


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable characters stand for themselves, other bytes for those from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTES = _alphabet()
