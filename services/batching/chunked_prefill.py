"""Prompts on their way into the target's KV: in pieces, and those that wait share a pass.

A pass over few tokens costs nearly as much as one over many, so the short prompts of several
new requests are computed together. A prompt that begins like one in work waits for that one,
and takes its KV.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import takewhile
from typing import Any

import mlx.core as mx

from protocol.messages import Tokens
from services.batching.forward import Batcher
from services.batching.prefill import ChunkSizer
from services.verifier.sequence import TargetSequence

_WORTH = 8
"""Tokens that a wait for another prompt's KV must save, at least."""


class ChunkedPrefill:
    """Computes prompts.

    Args:
        model: the target.
        step: most tokens of a pass.
        shares: whether the model takes several sequences in a pass (`parts`).
    """

    def __init__(self, model: Any, step: int, *, shares: bool) -> None:
        self._batcher = Batcher(model, 0)
        self._shares = shares
        self._pacer = ChunkSizer(step)
        self._wanted: dict[int, Tokens] = {}
        """By sequence: the prompts in work."""

    def comes(self, tokens: Tokens, held: int) -> bool:
        """Whether a prompt in work will hold half of what `tokens` lack beyond `held`."""
        common = max((_common(tokens, other) for other in self._wanted.values()), default=0)
        return common - held >= max(_WORTH, (len(tokens) - held) / 2)

    @contextlib.contextmanager
    def working(self, number: int, tokens: Tokens) -> Iterator[None]:
        """While this prompt is in work, others may wait for its KV."""
        self._wanted[number] = tokens
        try:
            yield
        finally:
            del self._wanted[number]

    def fill(
        self, sequence: TargetSequence, tokens: Tokens, alone: Callable[[], bool]
    ) -> Generator[None]:
        """Make the KV hold these tokens; yields where others may join in or have their turn.

        Args:
            sequence: holds a beginning of the tokens.
            tokens: of the whole prompt.
            alone: whether nobody's answer waits meanwhile.
        """
        while sequence.length < len(tokens):
            size = self._pacer.size(alone=alone())
            chunk = tokens[sequence.length : sequence.length + size]
            place = partial(sequence.place, len(chunk))
            asked = self._batcher.ask(chunk, sequence.caches, sequence.store, place)
            try:
                yield
                self._batcher.most_rows = size if self._shares else 0
                began, own = time.perf_counter(), asked.logits is None
                _, by = self._batcher.result(asked)
                # The logits stay uncomputed: MLX is lazy and only the KV is asked for.
                mx.eval([cache.state for cache in sequence.caches])
            finally:
                self._batcher.withdraw(asked)
            sequence.tokens += chunk
            if own:
                self._pacer.took(by.rows, time.perf_counter() - began)
            yield


def _common(one: Tokens, other: Tokens) -> int:
    """Length of the longest beginning that both have."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
