"""Keys and values inside a trace: buffers of a few sizes, in the form of mlx-lm caches."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from services.kernels.cuda.attention import MOST_SLOTS
from services.kernels.cuda.kv_rows import InPlace
from services.kv.cache import KVStore
from services.kv.slots import round_to_bucket

_STEPS = (
    (1024, 256), (4096, 512), (8192, 1024), (16384, 2048),
    (32768, 4096), (65536, 8192), (MOST_SLOTS, 16384),
)  # fmt: skip
"""(slots, step): up to that many slots, buffer sizes of traces are multiples of the step."""


class Shape(NamedTuple):
    """Shape of the passes that a trace serves."""

    rows: int
    slots: int
    forks: bool = False
    """True if the rows form a tree, or branches."""


def round_to_traced(slots: int) -> int:
    """Return the size of a trace's buffers with room for `slots` slots; 0 if there is none."""
    step = next((step for most, step in _STEPS if slots <= most), 0)
    return -(-slots // step) * step if step else 0


def round_to_largest(slots: int) -> int:
    """Return the largest buffer, in slots, for this many, replayed or not."""
    return round_to_traced(slots) or round_to_bucket(slots)


def prefill(model: Any, new_store: Callable[[], KVStore], length: int) -> KVStore:
    """Return a sequence of `length` tokens, for tests."""
    store = new_store()
    store.chain(length)
    mx.eval(model(mx.arange(1, 1 + length)[None], cache=store.caches))
    return store


def widen(store: KVStore, slots: int) -> None:
    """Grow the buffers to this many slots."""
    for cache in store.caches:
        cache.keys, cache.values = grow(cache.keys, slots), grow(cache.values, slots)


def grow(buffer: mx.array | None, end: int) -> mx.array:
    """Return the buffer with room for `end` slots."""
    if buffer is None:
        raise ValueError("a chain without tokens before it has no buffers to be traced with")
    missing = round_to_bucket(end) - buffer.shape[2]
    return buffer if missing <= 0 else mx.pad(buffer, [(0, 0), (0, 0), (0, missing), (0, 0)])


class PassRows:
    """Slots and positions of the rows of a traced pass: the same in all layers.

    Args:
        start: [] slot of the first one, and in a chain its position.
        count: number of rows.
        positions: [rows] of a tree's, or of branches; None for a chain.
        visible: [rows, slots] slots each of these attends to.
    """

    def __init__(
        self,
        start: mx.array,
        count: int,
        positions: mx.array | None = None,
        visible: mx.array | None = None,
    ) -> None:
        self.slots = start + count_to(count)
        """[rows]."""
        self.offset = start if positions is None else positions
        """RoPE's offset: [] or [rows]."""
        self.positions = self.slots if positions is None else positions
        """[rows]."""
        self._visible = visible

    def make_mask(self, slots: int, window_size: int | None) -> mx.array:
        """Return the slots each row attends to, bool [rows, slots]."""
        if self._visible is not None:
            if window_size is not None:
                raise ValueError("a tree is not traced through a sliding window")
            return self._visible
        queries, seen = self.slots[:, None], count_to(slots)[None]
        visible = seen <= queries
        return visible if window_size is None else visible & (queries - seen < window_size)


class LayerInputs(InPlace):
    """One layer's buffers inside the trace, in the form of an mlx-lm KV cache.

    Args:
        keys: [1, heads, slots, size], like `values`.
        values: of the layer.
        rows: of the pass.
        owned: as for `InPlace`.
    """

    def __init__(
        self, keys: mx.array, values: mx.array, rows: PassRows, *, owned: bool = False
    ) -> None:
        super().__init__(keys, values, rows.slots, owned=owned)
        self._rows = rows
        self.offset, self.positions = rows.offset, rows.positions

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Return the slots each of the `n` tokens attends to, bool [n, slots]."""
        del n, return_array
        return self._rows.make_mask(self.keys.shape[2], window_size)


def count_to(count: int) -> mx.array:
    """Return [count] int32: 0, 1, 2 and so on; a trace needs no launch for it."""
    numbers = _count()
    return numbers[:count] if count <= numbers.size else mx.arange(count)


@functools.cache
def _count() -> mx.array:
    numbers = mx.arange(MOST_SLOTS)
    mx.eval(numbers)
    return numbers
