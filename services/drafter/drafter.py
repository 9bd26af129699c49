"""The drafter service: turns rounds into calls of a backend, and its layers into DraftTrees."""

import time
from collections.abc import Generator

from protocol.errors import ProtocolError
from protocol.messages import (
    END_OF_BRANCH,
    CloseSequence,
    DraftNow,
    DraftTree,
    FromService,
    OpenSequence,
    Prefilled,
    Prepare,
)
from services.drafter.backends.base import DraftBackend, RoundOptions
from services.runtime.inbox import Work


class Drafter:
    """Keeps preparing drafts; interruptible between two layers."""

    def __init__(self, backend: DraftBackend) -> None:
        self._backend = backend
        self._open: set[int] = set()

    def forget(self) -> None:
        """Whoever asked is gone: close what is open."""
        for sequence in self._open:
            self._backend.close(sequence)
        self._open.clear()

    def supersedes(self, news: Work, current: Work) -> bool:
        """Any news of a sequence ends the work on an older round; only its end ends a prefill."""
        if news.sequence != current.sequence or isinstance(current, CloseSequence):
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
            case CloseSequence():
                self._open.discard(message.sequence)
                self._backend.close(message.sequence)
            case _:
                raise ProtocolError(f"a drafter cannot handle {type(message).__name__}")

    def _prefill(self, message: OpenSequence) -> Generator[FromService | None]:
        started = time.perf_counter()
        self._backend.close(message.sequence)
        yield from self._backend.open(message.sequence, message.tokens, message.sampling)
        yield Prefilled(
            sequence=message.sequence,
            length=len(message.tokens),
            prefill_ms=1e3 * (time.perf_counter() - started),
        )

    def _prepare(self, message: Prepare) -> Generator[FromService | None]:
        started = time.perf_counter()
        self._backend.commit(message.sequence, message.base, message.tokens)
        options = RoundOptions(message.round, message.held_back)
        layers = self._backend.prepare(
            message.sequence, message.chain, message.fan_out, message.depth, options
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
                confidences=layer.confidences,
                distributions=layer.distributions,
                draft_ms=1e3 * (now - started),
                last=depth == message.depth,
            )
            started = time.perf_counter()

    def _draft(self, message: DraftNow) -> Generator[FromService | None]:
        started = time.perf_counter()
        self._backend.commit(message.sequence, message.base, message.tokens)
        outcome = (message.accepted, message.pending)
        options = RoundOptions(message.round, message.held_back)
        depth = 0
        for drafted in self._backend.draft(
            message.sequence, message.pending, message.count, options
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
                confidences=[confidence],
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
