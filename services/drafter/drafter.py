"""The drafter service: turns rounds into calls of a backend, and its layers into DraftTrees.

Whoever asks may be a host of another kind, so each message is compared with what the sequence
holds and with what the backend can do before the backend sees it.
"""

import time
from collections.abc import Generator
from math import isfinite

import numpy as np

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
from services.drafter.backends.base import DraftBackend, RoundOptions, Rows, TargetReading
from services.runtime.inbox import Work
from services.runtime.sequence_table import SequenceTable, check_rewind


class Drafter:
    """Keeps preparing drafts; interruptible between two layers."""

    def __init__(self, backend: DraftBackend) -> None:
        self._backend = backend
        self._open: set[int] = set()
        self._lengths: SequenceTable[int] = SequenceTable()
        """Committed tokens of each sequence that is open and prefilled."""

    def forget(self) -> None:
        """Whoever asked is gone: close what is open."""
        for sequence in self._open:
            self._backend.close(sequence)
        self._open.clear()
        self._lengths.clear()

    def supersedes(self, news: Work, current: Work) -> bool:
        """Any news of a sequence ends the work on an older round; only its end ends a prefill."""
        if news.sequence != current.sequence or isinstance(current, CloseSequence):
            return False
        if isinstance(news, Features) or isinstance(current, Features):
            return False
        return not isinstance(current, OpenSequence) or isinstance(
            news, OpenSequence | CloseSequence
        )

    def linger_s(self, message: Work) -> float:
        """A drafter waits for nobody."""
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
        started = time.perf_counter()
        self._check_prepare(message)
        self._commit(message)
        options = RoundOptions(message.round, message.held_back)
        layers = self._backend.prepare(
            message.sequence, message.chain, message.fan_out, self._clip(message.depth), options
        )
        depth = 0
        for layer in layers:
            if layer is None:
                yield None
                continue
            depth += 1
            now = time.perf_counter()
            yield DraftTree(
                sequence=message.sequence,
                round=message.round,
                depth=depth,
                outcomes=[(o.accepted, o.bonus) for o in layer.outcomes] if depth == 1 else [],
                tokens=layer.tokens,
                confidences=[_to_probability(c) for c in layer.confidences],
                distributions=layer.distributions,
                draft_ms=1e3 * (now - started),
                last=depth == message.depth,
            )
            started = time.perf_counter()

    def _draft(self, message: DraftNow) -> Generator[FromService | None]:
        started = time.perf_counter()
        self._check_tokens([message.pending])
        self._commit(message)
        outcome = (message.accepted, message.pending)
        options = RoundOptions(message.round, message.held_back)
        depth = 0
        for drafted in self._backend.draft(
            message.sequence, message.pending, self._clip(message.count), options
        ):
            if drafted is None:
                yield None
                continue
            token, confidence, distribution = drafted
            depth += 1
            yield DraftTree(
                sequence=message.sequence,
                round=message.round,
                depth=depth,
                outcomes=[outcome] if depth == 1 else [],
                tokens=[token],
                confidences=[_to_probability(confidence)],
                distributions=[distribution] if distribution.tokens else [],
                draft_ms=1e3 * (time.perf_counter() - started),
                last=depth == message.count,
            )
            started = time.perf_counter()
        if depth < message.count:
            yield DraftTree(
                sequence=message.sequence,
                round=message.round,
                depth=depth + 1,
                outcomes=[outcome] if depth == 0 else [],
                tokens=[END_OF_BRANCH],
                confidences=[0.0],
                draft_ms=1e3 * (time.perf_counter() - started),
                last=True,
            )

    def _commit(self, message: Prepare | DraftNow) -> None:
        """Bring the backend up to date; raises ProtocolError if the message does not fit."""
        check_rewind(self._lengths[message.sequence], message.base)
        self._check_tokens(message.tokens)
        self._backend.commit(message.sequence, message.base, message.tokens)
        self._lengths[message.sequence] = message.base + len(message.tokens)

    def _check_prepare(self, message: Prepare) -> None:
        self._check_tokens(message.chain)
        rows, most = len(message.chain), 1 + self._backend.identity.max_draft_tokens
        if not 1 <= rows <= most:
            raise ProtocolError(f"a chain of {rows} tokens is not 1 to {most} long")
        if len(message.fan_out) > rows:
            raise ProtocolError(
                f"a fan-out of {len(message.fan_out)} lengths does not fit a chain of {rows} tokens"
            )
        if sum(message.fan_out) > MAX_PREPARED:
            raise ProtocolError(
                f"{sum(message.fan_out)} branches are more than {MAX_PREPARED}, the most in a round"
            )

    def _clip(self, depth: int) -> int:
        """A backend may always draft less than it is asked for."""
        return min(depth, self._backend.identity.max_draft_tokens)

    def _check_tokens(self, tokens: Tokens) -> None:
        size = self._backend.identity.vocabulary_size
        if size and tokens and max(tokens) >= size:
            raise ProtocolError(f"token {max(tokens)} is not in the vocabulary of {size}")


def _to_probability(confidence: float) -> float:
    """What a message may carry, whatever rounding and extreme logits made of it."""
    return min(1.0, max(0.0, confidence)) if isfinite(confidence) else 0.0
