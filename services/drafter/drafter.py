"""The drafter service: turns rounds into calls of a backend, and its layers into DraftTrees.

A host of another kind may send the messages, so each is checked against the sequence and the
backend's abilities before it reaches the backend.
"""

import time
from collections.abc import Generator, Iterable
from math import isfinite

import numpy as np

from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.errors import ProtocolError
from protocol.messages import (
    END_OF_BRANCH,
    MAX_PREPARED,
    CloseSequence,
    DraftNow,
    DraftTree,
    Features,
    FromService,
    OpenSequence,
    Prefilled,
    Prepare,
    Tokens,
)
from services.drafter.backends.base import (
    DraftBackend,
    RoundOptions,
    Rows,
    TargetReading,
    TreeLayer,
)
from services.runtime.inbox import Work
from services.runtime.sequence_table import SequenceTable, check_rewind


class Drafter:
    """Prepares drafts; interruptible between two layers."""

    def __init__(self, backend: DraftBackend) -> None:
        self._backend = backend
        self._open: set[int] = set()
        self._lengths: SequenceTable[int] = SequenceTable()
        """Committed tokens of each sequence that is open and prefilled."""

    def forget(self) -> None:
        """Close all sequences: the orchestrator is gone."""
        for sequence in self._open:
            self._backend.close(sequence)
        self._open.clear()
        self._lengths.clear()

    def supersedes(self, news: Work, current: Work) -> bool:
        """Return True for news of a sequence with older work; only its end aborts a prefill."""
        if news.sequence != current.sequence or isinstance(current, CloseSequence):
            return False
        if isinstance(news, Features) or isinstance(current, Features):
            return False
        return not isinstance(current, OpenSequence) or isinstance(
            news, OpenSequence | CloseSequence
        )

    def linger_s(self, message: Work) -> float:
        """Return 0: a drafter does not wait for other messages."""
        del message
        return 0.0

    def handle(self, message: Work) -> Generator[FromService | None]:
        """Answer one message (see `work_queue.Service`)."""
        match message:
            case OpenSequence():
                self._open.add(message.sequence)
                yield from self._prefill(message)
            case Prepare():
                yield from self._prepare(message)
            case DraftNow():
                yield from self._draft(message)
            case Features():
                if isinstance(self._backend, TargetReading):
                    self._backend.read(message.sequence, message.first, self._rows(message))
            case CloseSequence():
                self._open.discard(message.sequence)
                self._lengths.pop(message.sequence, None)
                self._backend.close(message.sequence)
            case _:
                raise ProtocolError(f"a drafter cannot handle {type(message).__name__}")

    def _rows(self, message: Features) -> Rows:
        request = self._backend.identity.features
        if request is None or len(message.data) % (
            message.count * np.dtype(request.dtype).itemsize
        ):
            raise ProtocolError(f"{len(message.data)} bytes are not {message.count} rows")
        return np.frombuffer(message.data, request.dtype).reshape(message.count, -1)

    def _prefill(self, message: OpenSequence) -> Generator[FromService | None]:
        started = time.perf_counter()
        self._lengths.pop(message.sequence, None)
        self._backend.close(message.sequence)
        self._check_tokens(message.tokens)
        yield from self._backend.open(message.sequence, message.tokens, message.sampling)
        self._lengths[message.sequence] = len(message.tokens)
        yield Prefilled(
            sequence=message.sequence,
            length=len(message.tokens),
            prefill_ms=1e3 * (time.perf_counter() - started),
        )

    def _prepare(self, message: Prepare) -> Generator[FromService | None]:
        answers = _Answers(message, [])
        tree = self._check_prepare(message)
        self._commit(message)
        options, depth = self._options(message), self._clip(message.depth)
        sequence, fan_out = message.sequence, message.fan_out
        yield from answers.send(self._backend.prepare(sequence, tree, fan_out, depth, options))

    def _draft(self, message: DraftNow) -> Generator[FromService | None]:
        answers = _Answers(message, [(message.accepted, message.pending)])
        self._check_tokens([message.pending])
        self._commit(message)
        if not message.count:
            return  # it only aborts a draft, or catches up
        options, count = self._options(message), self._clip(message.count)
        sequence, pending = message.sequence, message.pending
        yield from answers.send(self._backend.draft(sequence, pending, count, options))
        yield from answers.finish()

    @property
    def _takes_trees(self) -> bool:
        return self._backend.identity.takes_trees

    def _options(self, message: Prepare | DraftNow) -> RoundOptions:
        return RoundOptions(
            message.round,
            message.held_back,
            siblings=message.siblings if self._takes_trees else 0,
        )

    def _commit(self, message: Prepare | DraftNow) -> None:
        """Update the backend; raises ProtocolError if the message does not fit."""
        sequence, base, tokens = message.sequence, message.base, message.tokens
        check_rewind(self._lengths[sequence], base)
        self._check_tokens(tokens)
        self._backend.commit(sequence, base, tokens)
        self._lengths[sequence] = base + len(tokens)

    def _check_prepare(self, message: Prepare) -> TokenTree:
        self._check_tokens(message.nodes)
        rows, most = len(message.nodes), 1 + self._backend.identity.max_draft_tokens
        if not 1 <= rows <= most:
            raise ProtocolError(f"a chain of {rows} tokens is not 1 to {most} long")
        tree = read_tree(message.nodes, message.parents)
        if not (tree.is_chain or self._takes_trees):
            raise ProtocolError("this drafter prepares for chains, not for trees")
        if len(message.fan_out) > rows:
            raise ProtocolError(
                f"a fan-out of {len(message.fan_out)} lengths does not fit a chain of {rows} tokens"
            )
        if sum(message.fan_out) > MAX_PREPARED:
            raise ProtocolError(
                f"{sum(message.fan_out)} branches are more than {MAX_PREPARED}, the most in a round"
            )
        return tree

    def _clip(self, depth: int) -> int:
        """Return the depth to request; a backend may always draft less."""
        return min(depth, self._backend.identity.max_draft_tokens)

    def _check_tokens(self, tokens: Tokens) -> None:
        size = self._backend.identity.vocabulary_size
        if size and tokens and max(tokens) >= size:
            raise ProtocolError(f"token {max(tokens)} is not in the vocabulary of {size}")


class _Answers:
    """The trees that answer one message.

    Args:
        message: the request.
        known: the requested branch; empty if the layers name the branches.
    """

    def __init__(self, message: Prepare | DraftNow, known: list[tuple[int, int]]) -> None:
        self._message, self._known = message, known
        self._most = message.depth if isinstance(message, Prepare) else message.count
        self._began = time.monotonic_ns()
        self._depth, self._width = 0, 1

    def send(self, layers: Iterable[TreeLayer | None]) -> Generator[FromService | None]:
        """Yield one tree per layer."""
        for layer in layers:
            yield None if layer is None else self._tree(layer)

    def finish(self) -> Generator[FromService]:
        """Yield a last tree, if there were fewer layers than requested."""
        if self._depth < self._most:
            ends = [END_OF_BRANCH] * self._width
            yield self._tree(TreeLayer([], ends, [0.0] * self._width), is_last=True)

    def _tree(self, layer: TreeLayer, *, is_last: bool = False) -> DraftTree:
        self._depth, self._width = self._depth + 1, len(layer.tokens)
        outcomes = self._known or [(o.accepted, o.bonus) for o in layer.outcomes]
        # Where one layer ends the next begins, however long sending the first takes.
        now = time.monotonic_ns()
        began, self._began = self._began, now
        return DraftTree(
            sequence=self._message.sequence,
            round=self._message.round,
            depth=self._depth,
            outcomes=outcomes if self._depth == 1 else [],
            tokens=layer.tokens,
            parents=layer.parents,
            confidences=[_to_probability(c) for c in layer.confidences],
            distributions=layer.distributions,
            draft_ms=(now - began) / 1e6,
            at_ns=now,
            last=is_last or self._depth == self._most,
        )


def _to_probability(confidence: float) -> float:
    """Clamp a confidence, which rounding or extreme logits may push out of range."""
    return min(1.0, max(0.0, confidence)) if isfinite(confidence) else 0.0
