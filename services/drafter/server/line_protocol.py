"""Syntax of the line protocol, for both ends (`docs/guide/draft-server.md` defines it)."""

import re

from protocol.errors import ProtocolError
from protocol.messages import Tokens

MAX_LINE_BYTES = 64 * 1024
MAX_DRAFT_TOKENS = 64

_ANSWER = re.compile(
    r"TOKENS (?P<tokens>\d{1,10}(?:,\d{1,10})*)? ?(?P<ms>\d{1,12}(?:\.\d{1,9})?)ms"
)


class Lines:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._bytes += data

    def cut(self) -> str | None:
        """Return the next whole line, or None if it has not arrived yet.

        Raises:
            ProtocolError: it is too long, or not ASCII.
        """
        end = self._bytes.find(b"\n")
        if max(end, len(self._bytes) if end < 0 else 0) > MAX_LINE_BYTES:
            raise ProtocolError(f"a line exceeds the limit of {MAX_LINE_BYTES} bytes")
        if end < 0:
            return None
        line = bytes(self._bytes[:end])
        del self._bytes[: end + 1]
        try:
            return line.decode("ascii").strip()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"the line {line[:80]!r} is not ASCII") from error


def tokens_line(tokens: Tokens, elapsed_ms: float) -> str:
    """Return the answer to DRAFT."""
    return f"TOKENS {','.join(map(str, tokens))} {elapsed_ms:.1f}ms"


def read_tokens(line: str) -> Tokens:
    """Return the tokens of an answer to DRAFT; raises ProtocolError for any other line."""
    match = _ANSWER.fullmatch(line)
    if match is None:
        raise ProtocolError(f"{line[:80]!r} is no answer to DRAFT")
    tokens = [int(token) for token in (match["tokens"] or "").split(",") if token]
    if any(token >= 2**31 for token in tokens):
        raise ProtocolError(f"{line[:80]!r} contains an impossible token")
    return tokens
