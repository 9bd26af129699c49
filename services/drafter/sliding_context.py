"""A drafter whose context is shorter than the target's: it drafts on the most recent tokens.

Where a sequence outgrows the context, the backend reopens it with its last tokens, half a context
of them, so that this is rare. A backend then counts positions from the first token that it has; the
noise belongs to the sequence's own positions, so `RoundOptions.shift` has the difference.
Everything else is up to the backend, and a shorter memory costs only acceptance.
"""

from collections.abc import Generator
from dataclasses import dataclass, field

from msgspec.structs import replace

from protocol.decoding.token_tree import TokenTree
from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    BackendIdentity,
    DraftBackend,
    RoundOptions,
    Rows,
    TargetReading,
    TreeLayer,
)
from services.runtime.sequence_table import SequenceTable, check_rewind


@dataclass
class _Window:
    sampling: Sampling
    tokens: Tokens
    """All committed tokens of the sequence."""
    first: int = 0
    """Position of the first token that the backend has."""
    held: bool = False
    """True if the backend has the sequence open, from there on."""
    states: list[tuple[int, Rows]] = field(default_factory=list)
    """The target's states that arrived, with their first positions."""

    def states_since_first(self) -> list[tuple[int, Rows]]:
        """Return the states of tokens that the backend has, by its own positions."""
        cut = [(first, rows[max(0, self.first - first) :]) for first, rows in self.states]
        return [(max(0, first - self.first), rows) for first, rows in cut if len(rows)]


class SlidingContextBackend:
    """A backend with a context of any length, built on one with a limit."""

    def __init__(self, backend: DraftBackend) -> None:
        self._backend = backend
        self._context = backend.identity.context_length
        self._windows: SequenceTable[_Window] = SequenceTable()
        self.identity: BackendIdentity = backend.identity._replace(context_length=0)

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Open the sequence with the tokens, or as many of the last as fit."""
        window = _Window(sampling, list(tokens))
        self._windows.pop(sequence, None)
        yield from self._reopen(sequence, window)
        self._windows[sequence] = window

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Rewind to `base` and append; the backend gets what fits its context."""
        window = self._windows[sequence]
        check_rewind(len(window.tokens), base)
        window.tokens[base:] = tokens
        fits = len(window.tokens) - window.first <= self._context
        if window.held and fits and base >= window.first:
            self._backend.commit(sequence, base - window.first, tokens)
        else:
            window.held = False

    def read(self, sequence: int, first: int, rows: Rows) -> None:
        """Pass on the target's states of tokens that the backend has; drop others."""
        window = self._windows.get(sequence)
        if window is None or not isinstance(self._backend, TargetReading):
            return
        window.states.append((first, rows))
        # Earlier ones will not be in the context again.
        oldest = first + len(rows) - self._context
        while window.states[0][0] + len(window.states[0][1]) <= oldest:
            del window.states[0]
        if window.held and first + len(rows) > window.first:
            skipped = max(0, window.first - first)
            self._backend.read(sequence, first + skipped - window.first, rows[skipped:])

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Prepare branches on the window; none if not even a chain fits the context."""
        window = self._windows[sequence]
        if not self._roomy(len(tree) + depth):
            return
        yield from self._make_room(sequence, window, len(tree) + depth)
        shifted = options._replace(shift=window.first)
        yield from self._backend.prepare(sequence, tree, fan_out, depth, shifted)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer | None]:
        """Draft on the window."""
        window = self._windows[sequence]
        if not self._roomy(1 + count):
            return
        yield from self._make_room(sequence, window, 1 + count)
        shifted = options._replace(shift=window.first)
        yield from self._backend.draft(sequence, pending, count, shifted)

    def close(self, sequence: int) -> None:
        """Drop the sequence."""
        self._windows.pop(sequence, None)
        self._backend.close(sequence)

    def _roomy(self, ahead: int) -> bool:
        """Return True if half the context holds what a round adds."""
        return ahead <= self._context - self._context // 2

    def _make_room(self, sequence: int, window: _Window, ahead: int) -> Generator[None]:
        """Have the sequence open with room for `ahead` more tokens."""
        if not window.held or len(window.tokens) - window.first + ahead > self._context:
            yield from self._reopen(sequence, window)

    def _reopen(self, sequence: int, window: _Window) -> Generator[None]:
        window.held = False
        self._backend.close(sequence)
        window.first = max(0, len(window.tokens) - self._context // 2)
        sampling, shape = window.sampling, window.sampling.logits_options
        if shape is not None:
            begins = max(0, shape.answer_from - window.first)
            sampling = replace(sampling, logits_options=replace(shape, answer_from=begins))
        yield from self._backend.open(sequence, window.tokens[window.first :], sampling)
        if isinstance(self._backend, TargetReading):
            states = window.states_since_first()
            for first, rows in states:
                self._backend.read(sequence, first, rows)
            window.states = [(window.first + first, rows) for first, rows in states]
        window.held = True
