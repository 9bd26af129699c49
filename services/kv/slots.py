"""Slots of one layer: a buffer of keys and values.

mlx-lm asks a cache for its mask (`make_mask`), for the RoPE offset (`offset`) and to store keys and
values (`update_and_fetch`). A `SlotCache` answers all three from the `Span` of its `KVStore`.
"""

import weakref
from typing import TYPE_CHECKING

import mlx.core as mx

from services.mlx.array_memory import view

if TYPE_CHECKING:
    from services.kv.cache import KVStore

Shape = tuple[int, int, int, int]
BUCKET = 256
"""Slots by which a buffer grows, and the bucket of key lengths on CUDA."""


class SlotCache:
    """One layer's keys and values, in the form of an mlx-lm KV cache."""

    def __init__(self, store: "KVStore", window: int | None) -> None:
        # The store owns its caches; a cycle would keep a closed sequence's KV alive until the next
        # garbage collection.
        self._store: KVStore = weakref.proxy(store)
        self.window = window
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def keys(self) -> mx.array | None:
        """[1, heads, slots, size]; moved out of a slot table if they are in one."""
        self._store.hand_out()
        return self._keys

    @keys.setter
    def keys(self, buffer: mx.array | None) -> None:
        self._store.resident = None
        self._keys = buffer

    @property
    def values(self) -> mx.array | None:
        """Values of all slots, like `keys`."""
        self._store.hand_out()
        return self._values

    @values.setter
    def values(self, buffer: mx.array | None) -> None:
        self._store.resident = None
        self._values = buffer

    def settle(self, shape: Shape, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Move to exclusive buffers of this shape and type; see `ResidentSlots`."""
        self._keys, self._values = (
            copy_slots(buffer, shape, dtype) for buffer in (self._keys, self._values)
        )
        return self._keys, self._values

    @property
    def plain_stores(self) -> list["KVStore"] | None:
        """`stores` if the layers of all of them are plain slots, else None."""
        return [self._store] if self._store.is_plain else None

    @property
    def stores(self) -> list["KVStore"]:
        """The one sequence this layer belongs to (see `PackedCache.stores`)."""
        return [self._store]

    @property
    def offset(self) -> int | mx.array:
        """Position, or array of positions, that mlx-lm passes to RoPE."""
        return self._store.span.offset

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the attention mask of the current pass over `n` rows."""
        if n != self._store.span.count:
            raise ValueError(
                f"the model asks for a mask of {n} tokens, the pass has {self._store.span.count}"
            )
        return self._store.mask(window_size or self.window, as_array=return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store [1, heads, rows, size] in the pass's slots; return all slots up to there."""
        span = self._store.span
        self.keys, self.values = stored = (
            store_rows(self.keys, keys, span.start),
            store_rows(self.values, values, span.start),
        )
        key_length = self._store.key_length(span.end)
        return stored[0][..., :key_length, :], stored[1][..., :key_length, :]

    def move(self, slots: mx.array, to: int) -> None:
        """Copy the rows in `slots` to the consecutive slots from `to` on."""
        if self.keys is None or self.values is None:
            raise ValueError("an empty cache has no slots to move")
        end = to + slots.size
        self.keys[..., to:end, :] = mx.take(self.keys, slots, axis=2)
        self.values[..., to:end, :] = mx.take(self.values, slots, axis=2)

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """Return the buffers up to the pass's end, for layers that share another's KV."""
        if self.keys is None or self.values is None:
            return None, None
        limit = self._store.key_length(self._store.span.end)
        return self.keys[..., :limit, :], self.values[..., :limit, :]

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for evaluation; not those in a slot table."""
        return [array for array in (self._keys, self._values) if array is not None]


def copy_slots(buffer: mx.array | None, shape: Shape, dtype: mx.Dtype) -> mx.array:
    """Copy the buffer to one of this shape and type."""
    wider = mx.zeros(shape, dtype)
    mx.eval(wider)
    if buffer is not None:
        given = buffer.astype(dtype)
        mx.eval(given)
        slots = min(shape[2], given.shape[2])
        view(wider)[..., :slots, :] = view(given)[..., :slots, :]
    return wider


def round_to_bucket(length: int) -> int:
    """Return the slots of a buffer that holds `length` tokens."""
    return -(-length // BUCKET) * BUCKET


def grow(buffer: mx.array | None, end: int) -> mx.array:
    """Return the buffer with room for `end` slots."""
    if buffer is None:
        raise ValueError("a chain without tokens before it has no buffers to be traced with")
    missing = round_to_bucket(end) - buffer.shape[2]
    return buffer if missing <= 0 else mx.pad(buffer, [(0, 0), (0, 0), (0, missing), (0, 0)])


def store_rows(buffer: mx.array | None, rows: mx.array, start: int) -> mx.array:
    """Return `buffer` with `rows` at slot `start`, grown if necessary."""
    end = start + rows.shape[2]
    capacity = 0 if buffer is None else buffer.shape[2]
    if buffer is None or end > capacity:
        slots = round_to_bucket(end)
        grown = mx.zeros((1, rows.shape[1], slots, rows.shape[3]), rows.dtype)
        if buffer is not None:
            grown[..., :capacity, :] = buffer
        buffer = grown
    buffer[..., start:end, :] = rows
    return buffer
