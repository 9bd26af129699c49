"""A drafter backend behind the line protocol: one context, greedy drafts."""

import logging
import os
import time

from protocol.errors import ProtocolError, StreamEnded
from protocol.messages import Sampling, Tokens
from protocol.transport.pipes import READ_BYTES, readable, write_all
from services.drafter.backends.base import DraftBackend
from services.drafter.server.line_protocol import MAX_DRAFT_TOKENS, Lines, tokens_line

_log = logging.getLogger(__name__)

_IDLE_S = 3600.0
_CONTEXT, _SCRATCH = 1, 2
"""The backend's sequences: the one that DRAFT extends, and BENCH's."""
_BENCH_TOKENS = 32


class LineServer:
    """Answers lines; the context holds every token sent since the last RESET."""

    def __init__(self, backend: DraftBackend) -> None:
        self._backend = backend
        self._context: Tokens = []
        self._committed = 0
        """How many of them are committed in the backend."""
        self._reset()

    def serve(self, reading: int, writing: int) -> None:
        """Answer until QUIT.

        Raises:
            StreamEnded: the host disconnected.
            ProtocolError: the received data are not lines.
        """
        lines = Lines()
        self._say(writing, "READY")
        while True:
            line = lines.cut()
            if line is None:
                lines.feed(_read(reading))
            elif line.upper() == "QUIT":
                return
            elif line:
                self._say(writing, self.answer(line))

    @staticmethod
    def _say(writing: int, line: str) -> None:
        write_all(writing, f"{line}\n".encode(), "reader of our lines")

    def answer(self, line: str) -> str:
        """Return the answer to one command; ERROR and a sentence if it fails."""
        match line.upper().split():
            case ["PING"]:
                return "PONG"
            case ["RESET"]:
                self._reset()
                return "OK"
            case ["BENCH"]:
                return self._bench()
            case ["DRAFT", token, count] if token.isdecimal() and count.isdecimal():
                return self._draft(int(token[:12]), int(count[:12]))
            case _:
                return "ERROR unknown command; known: DRAFT <token> <n>, RESET, PING, BENCH, QUIT"

    def _reset(self) -> None:
        self._backend.close(_CONTEXT)
        self._context, self._committed = [], 0
        for _ in self._backend.open(_CONTEXT, [], Sampling()):
            pass

    def _draft(self, token: int, count: int) -> str:
        if error := self._find_error(token, count):
            return f"ERROR {error}"
        started = time.perf_counter()
        try:
            self._backend.commit(_CONTEXT, self._committed, self._context[self._committed :])
            self._committed = len(self._context)
            self._context.append(token)
            layers = self._backend.draft(_CONTEXT, token, count)
            drafts = [layer.tokens[0] for layer in layers if layer is not None]
        # The host decides how to continue; a partially updated context would mislead it.
        except Exception as error:  # noqa: BLE001
            _log.exception("DRAFT %d %d failed", token, count)
            self._reset()
            return f"ERROR {type(error).__name__}; the context was reset"
        return tokens_line(drafts, 1e3 * (time.perf_counter() - started))

    def _find_error(self, token: int, count: int) -> str:
        identity = self._backend.identity
        if token >= (identity.vocabulary_size or 2**31):
            return f"token {token} is not in the vocabulary"
        if not 1 <= count <= MAX_DRAFT_TOKENS:
            return f"1 to {MAX_DRAFT_TOKENS} tokens can be drafted"
        if 0 < identity.context_length < len(self._context) + count:
            return f"the context of {identity.context_length} tokens is full; RESET empties it"
        return ""

    def _bench(self) -> str:
        """Time a draft in a separate context: the host's stays unchanged."""
        for _ in self._backend.open(_SCRATCH, [], Sampling()):
            pass
        started = time.perf_counter()
        drafts = self._backend.draft(_SCRATCH, 0, _BENCH_TOKENS)
        count = sum(1 for one in drafts if one is not None)
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        self._backend.close(_SCRATCH)
        return f"BENCH {count} {elapsed_ms:.1f}ms"


def _read(descriptor: int) -> bytes:
    while not readable(descriptor, _IDLE_S):
        pass
    data = os.read(descriptor, READ_BYTES)
    if not data:
        raise StreamEnded("the host has gone")
    if b"\0" in data:
        raise ProtocolError("the host sends no lines")
    return data
