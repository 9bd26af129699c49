"""Keys and values of many sequences of equal length, for generation.

All rows are at the same position, so one offset and one mask serve them all. Several new tokens
attend to the whole buffer, a multiple of `_BUCKET` slots, with an explicit mask: MLX on CUDA builds
a plan for every new key length, so lengths must recur. A single new token attends to everything
stored and needs no mask, so that its attention uses the kernel for single queries.
"""

from collections.abc import Sequence

import mlx.core as mx

_BUCKET = 128


class BatchStore:
    """The caches of all layers and the position they share."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.offset = 0
        self.count = 0
        self.caches = [BatchCache(self, window) for window in windows]
        self._masks: dict[int | None, mx.array] = {}

    def advance(self, count: int) -> None:
        """Prepare a forward pass that appends `count` tokens to every row."""
        self.offset += self.count
        self.count = count
        self._masks = {}

    @property
    def slots(self) -> int:
        """Number of slots that attention gets, used or not."""
        return -(-(self.offset + self.count) // _BUCKET) * _BUCKET

    def sees_all(self, window: int | None) -> bool:
        """Return True if there is a single new token, which attends to every slot in use."""
        return self.count == 1 and (window is None or self.offset < window)

    def mask(self, window: int | None) -> mx.array:
        """Return [count, slots] bool, the slots each new token attends to."""
        if window not in self._masks:
            queries = mx.arange(self.offset, self.offset + self.count)[:, None]
            keys = mx.arange(self.slots)[None]
            visible = keys <= queries
            if window is not None:
                visible = visible & (queries - keys < window)
            self._masks[window] = visible
        return self._masks[window]

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for evaluation."""
        return [array for cache in self.caches for array in cache.state]


class BatchCache:
    """One layer's keys and values, in the form of an mlx-lm KV cache."""

    def __init__(self, store: BatchStore, window: int | None) -> None:
        self._store = store
        self._window = window
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def offset(self) -> int:
        """Position of the first new token."""
        return self._store.offset

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return [n, slots] bool, or None where nothing is masked."""
        del n, return_array
        window = window_size or self._window
        if not self._is_exact:
            return self._store.mask(window)
        hidden = not self._store.sees_all(window)
        return self._store.mask(window)[:, : self._store.offset + 1] if hidden else None

    @property
    def _is_exact(self) -> bool:
        return self._store.sees_all(self._window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store [rows, heads, count, size]; return all slots, or those in use."""
        self._keys = self._write(self._keys, keys)
        self._values = self._write(self._values, values)
        if self._is_exact:
            used = self._store.offset + 1
            return self._keys[..., :used, :], self._values[..., :used, :]
        return self._keys, self._values

    def _write(self, buffer: mx.array | None, new: mx.array) -> mx.array:
        slots, start = self._store.slots, self._store.offset
        if buffer is None:
            buffer = mx.zeros((*new.shape[:2], slots, new.shape[3]), new.dtype)
        elif buffer.shape[2] < slots:
            empty = mx.zeros((*new.shape[:2], slots - buffer.shape[2], new.shape[3]), new.dtype)
            buffer = mx.concatenate([buffer, empty], axis=2)
        buffer[..., start : start + new.shape[2], :] = new
        return buffer

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for evaluation."""
        return [array for array in (self._keys, self._values) if array is not None]
