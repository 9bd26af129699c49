"""Drafts from a program that speaks the line protocol.

Its context is everything sent to it since the last RESET, and only RESET takes anything back. So it
is sent only final tokens: the committed ones, and the pending one. While the target verifies, the
pending token's continuation is requested beyond the end of the chain: where it leaves the chain, it
gives one outcome and its continuation. The protocol supports no more than that: one branch, no
probabilities, one sequence, and no interruption.
"""

import os
from collections.abc import Generator

from protocol.decoding.token_tree import TokenTree
from protocol.errors import (
    BackendLost,
    DeadlineExceeded,
    ModelError,
    ProtocolError,
    StreamEnded,
)
from protocol.messages import Sampling, Tokens
from protocol.process.deadline import Deadline
from protocol.transport.pipes import READ_BYTES, readable, write_all
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    BackendIdentity,
    Outcome,
    RoundOptions,
    TreeLayer,
)
from services.drafter.relay.process import DrafterProcess
from services.drafter.server.line_protocol import MAX_DRAFT_TOKENS, Lines, read_tokens
from services.runtime.sequence_table import check_rewind

_CONFIDENCE = 0.5
"""The protocol has none; the orchestrator learns the reliability of this one."""


class LineBackend:
    """Draft backend on the line protocol; see `base.DraftBackend`.

    Raises:
        ModelError: the program violates the protocol.
        BackendLost: it exited, hung, or sent an invalid line.
    """

    def __init__(
        self, program: DrafterProcess, ready_timeout_s: float, answer_timeout_s: float
    ) -> None:
        self._program = program
        self._timeout_s = answer_timeout_s
        self._lines = Lines()
        self._sequence: int | None = None
        """The sequence of its context."""
        self._committed: Tokens = []
        self._sent: Tokens = []
        """The program's context."""
        self._continuation: Tokens = []
        """The program's continuation of its context."""
        self.identity = BackendIdentity(
            backend="stdio",
            model=program.name,
            tokenizer_fingerprint="",
            vocabulary_size=0,
            context_length=0,
            compute_unit="unknown",
            max_draft_tokens=MAX_DRAFT_TOKENS,
        )
        self._expect("READY", self._line(ready_timeout_s))
        self._expect("PONG", self._ask("PING"))
        self._check()

    # ------------------------------------------------------------ DraftBackend

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Send the tokens one by one; may be abandoned after each."""
        del sampling  # it drafts greedily
        self._sequence, self._committed = sequence, list(tokens)
        self._reset()
        for token in tokens:
            self._send(token, 1)
            yield
            self._check_owner(sequence)

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Record the committed tokens; they are sent when a draft is requested."""
        self._check_owner(sequence)
        check_rewind(len(self._committed), base)
        self._committed[base:] = tokens

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Yield the one outcome that its continuation names, and the rest as that branch."""
        del options
        pending, *draft = tree.tokens
        continuation = yield from self._after(sequence, pending, len(tree) + depth)
        agreed = 0
        while agreed < min(len(draft), len(continuation)) and draft[agreed] == continuation[agreed]:
            agreed += 1
        if agreed >= min(len(continuation), len(fan_out)) or not fan_out[agreed]:
            return
        outcome = [Outcome(agreed, continuation[agreed])]
        for token in continuation[agreed + 1 : agreed + 1 + depth]:
            yield TreeLayer(outcome, [token], [_CONFIDENCE])

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer | None]:
        """Yield its continuation of the pending token."""
        del options
        continuation = yield from self._after(sequence, pending, count)
        for token in continuation[:count]:
            yield TreeLayer([], [token], [_CONFIDENCE])

    def close(self, sequence: int) -> None:
        """Drop the sequence; the next one resets the context."""
        if sequence == self._sequence:
            self._sequence = None

    # ------------------------------------------------------------ the context

    def _check_owner(self, sequence: int) -> None:
        if sequence != self._sequence:
            raise ProtocolError("a line server drafts for the newest sequence only")

    def _after(self, sequence: int, pending: int, count: int) -> Generator[None, None, Tokens]:
        """Return the continuation of committed and pending tokens; pauses while it sends."""
        self._check_owner(sequence)
        wanted = [*self._committed, pending]
        if self._sent == wanted:
            return self._continuation  # without a further token, it cannot be asked again
        if self._sent != wanted[: len(self._sent)]:
            self._reset()
        while len(self._sent) < len(wanted) - 1:
            self._send(wanted[len(self._sent)], 1)
            yield
            self._check_owner(sequence)
        self._send(pending, min(count, MAX_DRAFT_TOKENS))
        return self._continuation

    def _send(self, token: int, count: int) -> None:
        line = self._ask(f"DRAFT {token} {count}")
        if line.startswith("ERROR"):
            self._sequence = None
            raise ProtocolError(f"the draft command {self._program.name!r}: {line[:200]}")
        try:
            self._continuation = read_tokens(line)[:count]
        except ProtocolError as error:
            raise BackendLost(f"the draft command {self._program.name!r}: {error}") from error
        self._sent.append(token)

    def _reset(self) -> None:
        self._expect("OK", self._ask("RESET"))
        self._sent, self._continuation = [], []

    def _check(self) -> None:
        """Check that RESET clears the context and drafts stay out of it."""
        first = self._drafts_after(1)
        second = self._drafts_after(1, 2)
        if (first, second) != (self._drafts_after(1), self._drafts_after(1, 2)):
            raise ModelError(f"{self._program.name!r} drafts otherwise after RESET than before")
        if first and first[1:2] != self._drafts_after(1, first[0])[:1]:
            raise ModelError(f"{self._program.name!r} keeps its drafts in the context")

    def _drafts_after(self, *tokens: int) -> Tokens:
        self._reset()
        for token in tokens:
            self._send(token, 2)
        return self._continuation

    # ------------------------------------------------------------ lines

    def _ask(self, command: str) -> str:
        try:
            who = f"reader in the draft command {self._program.name!r}"
            write_all(self._program.writing, f"{command}\n".encode(), who, self._timeout_s)
        except StreamEnded as error:
            raise BackendLost(self._program.last_words()) from error
        except DeadlineExceeded as error:
            raise BackendLost(f"{error} (draft_timeout_s)") from error
        return self._line(self._timeout_s)

    def _line(self, timeout_s: float) -> str:
        deadline = Deadline(timeout_s)
        while (line := self._cut()) is None:
            if not readable(self._program.reading, deadline.remaining):
                raise BackendLost(
                    f"the draft command {self._program.name!r} did not answer within "
                    f"{timeout_s:g} s (draft_timeout_s, or start_timeout_s at its start)"
                )
            data = os.read(self._program.reading, READ_BYTES)
            if not data:
                raise BackendLost(self._program.last_words())
            self._lines.feed(data)
        return line

    def _cut(self) -> str | None:
        try:
            return self._lines.cut()
        except ProtocolError as error:
            raise BackendLost(f"the draft command {self._program.name!r}: {error}") from error

    def _expect(self, word: str, line: str) -> None:
        if line != word:
            raise BackendLost(
                f"the draft command {self._program.name!r} said {line[:80]!r} and not {word}"
            )
