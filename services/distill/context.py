"""What a drafter that reads the target is given in training: as much as it will have at work.

At work the target's states are known up to the last committed token. The tokens after it, a
chain under verification and branches behind it, are the drafter's own to read. So a training
sequence is cut into blocks: within a block a token sees the target's states before the block,
and the tokens of its own block as the drafter itself computes them. Some sequences have no
states at all, or none of their beginning, so that the drafter also works without.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from services.distill.generation import Integers
from services.mlx.target_reader import TargetReader

SHORTEST, LONGEST = 4, 14
"""Tokens of a block: a chain and the branches behind it."""
_UNREAD, _LATE = 0.1, 0.05
"""Shares of sequences without states, and without those of their beginning."""


class Blocks(NamedTuple):
    """How sequences are cut."""

    starts: Integers
    """[rows, length] where the block of each token starts."""
    read_from: Integers
    """[rows] first position whose states are known."""

    @property
    def lags(self) -> Integers:
        """[rows, length] tokens from the last known state to this one, itself included."""
        lags: Integers = np.arange(self.starts.shape[1], dtype=np.int32) - self.starts + 1
        return lags


def random_blocks(rows: int, length: int, chance: np.random.Generator) -> Blocks:
    """Blocks of random lengths for training."""
    sizes = chance.integers(SHORTEST, LONGEST + 1, rows)[:, None]
    kind = chance.random(rows)
    read_from = np.where(kind < _LATE, chance.integers(0, length, rows), 0)
    read_from = np.where(kind > 1 - _UNREAD, length, read_from)
    return cut(sizes, chance.integers(0, LONGEST, rows)[:, None], read_from, length)


def even_blocks(rows: int, length: int, size: int, shift: int) -> Blocks:
    """Blocks of one length, all states known."""
    sizes = np.full((rows, 1), size)
    return cut(sizes, np.full((rows, 1), shift), np.zeros(rows, np.int64), length)


def cut(sizes: Any, shifts: Any, read_from: Any, length: int) -> Blocks:
    """[rows, 1] sizes and shifts, [rows] first known states."""
    places = np.arange(length)[None]
    starts = (places - shifts) // sizes * sizes + shifts
    first = read_from[:, None]
    starts = np.where(places < first, 0, np.maximum(starts, np.minimum(first, length)))
    return Blocks(np.maximum(starts, 0).astype(np.int32), read_from.astype(np.int32))


class Context(NamedTuple):
    """What stands before a batch's tokens, on the device."""

    features: mx.array
    """[rows, length, features] the target's states."""
    visible: mx.array
    """[rows, 1, length, 2 * length]: which states, then which tokens each token sees."""


def context_of(features: mx.array, blocks: Blocks) -> Context:
    """The features as these blocks show them."""
    starts = mx.array(blocks.starts)[:, :, None]
    read_from = mx.array(blocks.read_from)[:, None, None]
    places = mx.arange(blocks.starts.shape[1])
    keys, queries = places[None, None, :], places[None, :, None]
    states = (keys < starts) & (keys >= read_from)
    tokens = (keys <= queries) & ((keys >= starts) | (keys < read_from))
    return Context(features, mx.concatenate([states, tokens], axis=-1)[:, None])


class ContextCache:
    """One layer's keys and values of the context; what mlx-lm takes for a KV cache."""

    offset = 0

    def __init__(self, keys: mx.array, values: mx.array, visible: mx.array) -> None:
        self._keys = keys
        self._values = values
        self._visible = visible

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """[rows, 1, n, 2 * n] bool."""
        del return_array
        if window_size is None:
            return self._visible
        places = mx.arange(n)
        near = places[:, None] - places[None] < window_size
        return self._visible & mx.concatenate([near, near], axis=-1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The context's rows, then the tokens' own."""
        return (
            mx.concatenate([self._keys.astype(keys.dtype), keys], axis=2),
            mx.concatenate([self._values.astype(values.dtype), values], axis=2),
        )


def context_caches(model: Any, reader: TargetReader, context: Context) -> list[ContextCache]:
    """The caches with which the drafter sees this context."""
    rows = reader.rows(model, context.features, 0)
    return [ContextCache(keys, values, context.visible) for keys, values in rows]
