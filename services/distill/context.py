"""Training context of a drafter that reads the target: the same as at inference.

At inference the target's states are known up to the last committed token. The drafter reads the
tokens after it, a chain under verification and branches, by itself. So a training sequence is cut
into blocks: within a block a token attends to the target's states before the block, and to the
tokens of its own block as the drafter itself computes them. Some sequences have no states at all,
or none at their beginning, so that the drafter also works without.

If the last state is also input, the drafter's own output replaces it after the first token of a
block. Then a batch takes several passes, each with the outputs of the one before as inputs: the
n-th is exact up to the n-th token of a block.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from services.distill.generation import Integers
from services.distill.logits import logits_at
from services.mlx.target_reader import TargetReader, add_to_embeddings

PASSES = 3
"""Passes over a batch in training if a drafter's output is its input."""
_LEARNED = 2
"""The last passes, through which gradients flow."""
SHORTEST, LONGEST = 4, 14
"""Tokens of a block: a chain and the branches after it."""
_UNREAD, _LATE = 0.1, 0.05
"""Shares of sequences without states, and without those of their beginning."""


class Blocks(NamedTuple):
    """The division of sequences into blocks."""

    starts: Integers
    """[rows, length] start of each token's block."""
    read_from: Integers
    """[rows] first position whose states are known."""

    @property
    def lags(self) -> Integers:
        """[rows, length] tokens from the last known state to this one, itself included."""
        lags: Integers = np.arange(self.starts.shape[1], dtype=np.int32) - self.starts + 1
        return lags


def random_blocks(rows: int, length: int, chance: np.random.Generator) -> Blocks:
    """Return blocks of random lengths for training."""
    sizes = chance.integers(SHORTEST, LONGEST + 1, rows)[:, None]
    kind = chance.random(rows)
    read_from = np.where(kind < _LATE, chance.integers(0, length, rows), 0)
    read_from = np.where(kind > 1 - _UNREAD, length, read_from)
    return cut(sizes, chance.integers(0, LONGEST, rows)[:, None], read_from, length)


def even_blocks(rows: int, length: int, size: int, shift: int) -> Blocks:
    """Return blocks of one length, all states known."""
    sizes = np.full((rows, 1), size)
    return cut(sizes, np.full((rows, 1), shift), np.zeros(rows, np.int64), length)


def cut(sizes: Any, shifts: Any, read_from: Any, length: int) -> Blocks:
    """Cut blocks by [rows, 1] sizes and shifts, and [rows] first known states."""
    places = np.arange(length)[None]
    starts = (places - shifts) // sizes * sizes + shifts
    first = read_from[:, None]
    starts = np.where(places < first, 0, np.maximum(starts, np.minimum(first, length)))
    return Blocks(np.maximum(starts, 0).astype(np.int32), read_from.astype(np.int32))


class Context(NamedTuple):
    """Hidden states before a batch's tokens, on the device."""

    features: mx.array
    """[rows, length, features] the target's states."""
    visible: mx.array
    """[rows, 1, length, 2 * length]: the states, then the tokens each token attends to."""
    first: mx.array
    """[rows, length, 1] True if the state of the token before is known."""
    later: mx.array
    """[rows, length, 1] True if that of an earlier token of its own block is known."""


def context_of(features: mx.array, blocks: Blocks) -> Context:
    """Return the features as visible in these blocks."""
    starts = mx.array(blocks.starts)[:, :, None]
    read_from = mx.array(blocks.read_from)[:, None, None]
    places = mx.arange(blocks.starts.shape[1])
    keys, queries = places[None, None, :], places[None, :, None]
    states = (keys < starts) & (keys >= read_from)
    tokens = (keys <= queries) & ((keys >= starts) | (keys < read_from))
    visible = mx.concatenate([states, tokens], axis=-1)[:, None]
    behind_state = starts > read_from
    is_start = places[None, :, None] == starts
    return Context(features, visible, behind_state & is_start, behind_state & ~is_start)


class ContextCache:
    """One layer's keys and values of the context, in the form of an mlx-lm KV cache."""

    offset = 0

    def __init__(self, keys: mx.array, values: mx.array, visible: mx.array) -> None:
        self._keys = keys
        self._values = values
        self._visible = visible

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Return [rows, 1, n, 2 * n] bool."""
        del return_array
        if window_size is None:
            return self._visible
        places = mx.arange(n)
        near = places[:, None] - places[None] < window_size
        return self._visible & mx.concatenate([near, near], axis=-1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the context's rows, then the tokens' own."""
        return (
            mx.concatenate([self._keys.astype(keys.dtype), keys], axis=2),
            mx.concatenate([self._values.astype(values.dtype), values], axis=2),
        )


def context_caches(model: Any, reader: TargetReader, context: Context) -> list[ContextCache]:
    """Return caches that expose this context to the drafter."""
    rows = reader.rows(model, context.features, 0)
    return [ContextCache(keys, values, context.visible) for keys, values in rows]


def logits_in_context(
    model: Any,
    reader: TargetReader,
    context: Context,
    inputs: tuple[mx.array, mx.array],
    passes: int,
) -> mx.array:
    """Return a drafter's predictions in this context; see `logits_at`.

    Args:
        inputs: tokens and positions as there.
        passes: how many tokens of a block are computed as at inference, if the drafter's output
            is its input.
    """
    tokens, positions = inputs
    caches = context_caches(model, reader, context)
    if not reader.enters_input:
        return logits_at(model, tokens, positions, caches)
    state = mx.where(context.first, _shift_to_next(reader.after_state(context.features)), 0)
    added = state
    for number in range(1, passes):
        with add_to_embeddings(model, added):
            own = _shift_to_next(reader.after_own(model.model(tokens, cache=caches)))
        own = own if number > passes - _LEARNED else mx.stop_gradient(own)
        added = mx.where(context.later, own, state)
    with add_to_embeddings(model, added):
        return logits_at(model, tokens, positions, caches)


def _shift_to_next(rows: mx.array) -> mx.array:
    """Shift [rows, length, width] so that each token's row is at the next."""
    return mx.concatenate([mx.zeros_like(rows[:, :1]), rows[:, :-1]], axis=1)
