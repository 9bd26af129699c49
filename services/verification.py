"""The target model: prefill, and verification of a chain in one forward pass."""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from protocol.errors import ModelError, ProtocolError
from protocol.law import choose
from protocol.messages import (
    CloseSequence,
    FromService,
    OpenSequence,
    Prefilled,
    Sampling,
    VerificationOutcome,
    Verify,
)
from protocol.rejection import verified
from protocol.sampling import by_rejection, is_greedy
from services.inbox import Work
from services.kv import KVStore, windows_of
from services.model import LoadedModel, compute_unit
from services.rope import use_tables

MAX_DRAFT_TOKENS = 64


@dataclass
class _Sequence:
    """One sequence at the target: its caches, and how many tokens they hold."""

    caches: list[Any]
    store: KVStore | None
    """None for a model whose state cannot be rewound; then `caches` are mlx-lm's own."""
    sampling: Sampling
    length: int = 0


class Verifier:
    """Verifies chains; invariant: after each round the KV holds exactly the committed tokens."""

    def __init__(self, model: LoadedModel, prefill_step_size: int) -> None:
        self._model = model.module
        if compute_unit() == "cpu":
            use_tables(self._model)
        self._step = prefill_step_size
        self._sequences: dict[int, _Sequence] = {}
        self._idle_since = time.perf_counter()
        try:
            self._windows: list[int | None] | None = windows_of(self._model)
        except ModelError:
            self._windows = None

    @property
    def max_draft_tokens(self) -> int:
        """Longest draft that can be verified; 0 if the model's state cannot be rewound."""
        return 0 if self._windows is None else MAX_DRAFT_TOKENS

    def supersedes(self, news: Work, current: Work) -> bool:
        """A prefill is pointless once its sequence is closed or opened again."""
        return (
            isinstance(current, OpenSequence)
            and isinstance(news, OpenSequence | CloseSequence)
            and news.sequence == current.sequence
        )

    def handle(self, message: Work) -> Generator[FromService | None]:
        """Answer one message (see `actor.Service`)."""
        started = time.perf_counter()
        match message:
            case OpenSequence():
                yield from self._open(message, started)
            case Verify():
                outcome = self._verify(message, started)
                # The next line may lose the core to whoever waited for the outcome.
                self._idle_since = time.perf_counter()
                yield outcome
            case CloseSequence():
                self._sequences.pop(message.sequence, None)
            case _:
                raise ProtocolError(f"a verifier cannot handle {type(message).__name__}")

    def _new_sequence(self, sampling: Sampling) -> _Sequence:
        if self._windows is None:
            return _Sequence(make_prompt_cache(self._model), None, sampling)
        store = KVStore(self._windows, bucketed=compute_unit() == "cuda")
        return _Sequence(list(store.caches), store, sampling)

    def _open(self, message: OpenSequence, started: float) -> Generator[FromService | None]:
        self._sequences.pop(message.sequence, None)
        sequence = self._new_sequence(message.sampling)
        for start in range(0, len(message.tokens), self._step):
            chunk = message.tokens[start : start + self._step]
            self._forward(sequence, chunk)
            # The chunk's logits stay uncomputed: MLX is lazy and only the KV is asked for.
            mx.eval([cache.state for cache in sequence.caches])
            yield None
        self._sequences[message.sequence] = sequence
        yield Prefilled(
            sequence=message.sequence,
            length=sequence.length,
            prefill_ms=1e3 * (time.perf_counter() - started),
        )

    def _forward(self, sequence: _Sequence, tokens: list[int]) -> mx.array:
        """Append tokens to the KV; lazy logits [tokens, vocabulary]."""
        if sequence.store is not None:
            sequence.store.chain(len(tokens))
        sequence.length += len(tokens)
        logits: mx.array = self._model(mx.array(tokens)[None], cache=sequence.caches)[0]
        return logits

    def _verify(self, message: Verify, started: float) -> VerificationOutcome:
        sequence = self._sequences.get(message.sequence)
        chain = message.chain
        if sequence is None:
            raise ProtocolError(f"sequence {message.sequence} is not open")
        if message.position != sequence.length:
            raise ProtocolError(
                f"the chain starts at position {message.position} "
                f"but the KV holds {sequence.length} tokens"
            )
        if not 1 <= len(chain) <= 1 + self.max_draft_tokens:
            raise ProtocolError(f"cannot verify a chain of {len(chain)} tokens")
        if len(message.laws) not in (0, len(chain) - 1):
            raise ProtocolError(f"{len(message.laws)} laws for {len(chain) - 1} draft tokens")
        logits = self._forward(sequence, chain)
        accepted, bonus = self._judged(logits, message, sequence.sampling)
        self._rewind(sequence, message.position + accepted + 1)
        return VerificationOutcome(
            sequence=message.sequence,
            round=message.round,
            accepted=accepted,
            bonus=bonus,
            verify_ms=1e3 * (time.perf_counter() - started),
            idle_ms=1e3 * (started - self._idle_since),
        )

    @staticmethod
    def _judged(logits: mx.array, message: Verify, sampling: Sampling) -> tuple[int, int]:
        """How many draft tokens of the chain stand, and the bonus token."""
        draft, first = message.chain[1:], message.position + 1
        if is_greedy(sampling):
            # Only a few integers leave the device.
            tokens: Any = mx.argmax(logits, axis=-1).tolist()
            chosen = [int(token) for token in tokens]
        elif by_rejection(sampling):
            return verified(host_floats(logits), draft, message.laws, first, sampling)
        else:
            chosen = choose(host_floats(logits), range(first, first + len(draft) + 1), sampling)
        accepted = accepted_length(draft, chosen)
        return accepted, chosen[accepted]

    @staticmethod
    def _rewind(sequence: _Sequence, length: int) -> None:
        if sequence.store is not None:
            sequence.store.trim(length)
            sequence.length = sequence.store.length
        if sequence.length != length:
            raise ProtocolError(f"the KV holds {sequence.length} tokens instead of {length}")


def accepted_length(draft: list[int], chosen: list[int]) -> int:
    """How many draft tokens equal the target's own choice, counted from the first (k)."""
    for index, (drafted, target) in enumerate(zip(draft, chosen, strict=False)):
        if drafted != target:
            return index
    return len(draft)


def host_floats(array: mx.array) -> npt.NDArray[np.float32]:
    """The array as numpy float32, without a copy where the memory is shared."""
    return np.array(array.astype(mx.float32), copy=False)
