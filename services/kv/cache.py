"""KV memory in slots: one buffer per layer, an append-only trunk and scratch slots behind it.

mlx-lm asks a cache for its mask (`make_mask`), for the RoPE offset (`offset`) and to store
keys and values (`update_and_fetch`). A `SlotCache` answers all three from the current
`Frame`, which its `KVStore` sets before each forward. So one flat sequence of tokens can be
a chain (a prompt, a verification) or a row of parallel branches, each token with its own
position and its own view of the slots, and no KV is ever copied to make a branch.

Sliding-window layers of a `KVStore` keep all slots; the window is a condition in the mask, as
a tree of branches needs it. Targets hold the window alone (`kv.window`).
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from protocol.errors import ModelError

BUCKET = 256
"""Slots a buffer grows by, and the bucket of key lengths on CUDA."""


@dataclass(frozen=True)
class Frame:
    """One forward's view of the slots. The new tokens go to slots [start, start + count)."""

    start: int
    count: int
    offset: int | mx.array
    """RoPE positions: the first of a chain, or [count] of parallel branches."""
    positions: npt.NDArray[np.int64]
    """[start + count] position of the token in each slot."""
    visible: npt.NDArray[np.bool_] | None
    """[count, start + count] which slots each new token sees; None for a chain."""


class SlotCache:
    """One layer's keys and values; what mlx-lm takes for a KV cache."""

    def __init__(self, store: "KVStore", window: int | None) -> None:
        # The store owns its caches; a cycle would keep a closed sequence's KV until the
        # garbage collector comes by.
        self._store: KVStore = weakref.proxy(store)
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def stores(self) -> list["KVStore"]:
        """The one sequence whose layer this is (see `PackedCache.stores`)."""
        return [self._store]

    @property
    def offset(self) -> int | mx.array:
        """What mlx-lm passes to RoPE: a position, or an array of them."""
        return self._store.frame.offset

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The attention mask of the current frame; `n` is the frame's count."""
        if n != self._store.frame.count:
            raise ValueError(f"the model asks for a mask of {n}, not {self._store.frame.count}")
        return self._store.mask(window_size or self.window, as_array=return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store [1, heads, count, size] at the frame's slots; return all slots up to there."""
        frame = self._store.frame
        end = frame.start + frame.count
        self.keys = _store_rows(self.keys, keys, frame.start)
        self.values = _store_rows(self.values, values, frame.start)
        key_length = self._store.key_length(end)
        return self.keys[..., :key_length, :], self.values[..., :key_length, :]

    def move(self, slots: mx.array, to: int) -> None:
        """Copy the rows in `slots` to the consecutive slots from `to` on."""
        if self.keys is None or self.values is None:
            raise ValueError("an empty cache has no slots to move")
        end = to + slots.size
        self.keys[..., to:end, :] = mx.take(self.keys, slots, axis=2)
        self.values[..., to:end, :] = mx.take(self.values, slots, axis=2)

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """The buffers up to the current frame's end; for layers that read another's."""
        if self.keys is None or self.values is None:
            return None, None
        limit = self._store.key_length(self._store.frame.start + self._store.frame.count)
        return self.keys[..., :limit, :], self.values[..., :limit, :]

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for evaluation."""
        return [array for array in (self.keys, self.values) if array is not None]


def round_to_bucket(length: int) -> int:
    """Slots of a buffer that holds so many tokens."""
    return -(-length // BUCKET) * BUCKET


def _store_rows(buffer: mx.array | None, rows: mx.array, start: int) -> mx.array:
    """`buffer` with `rows` at slot `start`, grown if it must be."""
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


class KVStore:
    """The caches of all layers of one sequence, and the frame they share.

    `length` is the number of trunk tokens; slots from there on are scratch.
    """

    def __init__(self, windows: Sequence[int | None], *, bucketed: bool) -> None:
        self.length = 0
        self.caches = [SlotCache(self, window) for window in windows]
        self._bucketed = bucketed
        self._narrowest = min((window for window in windows if window is not None), default=None)
        self._masks: dict[tuple[int | None, bool], mx.array | str | None] = {}
        self.frame = Frame(0, 0, 0, np.zeros(0, np.int64), None)

    def _set(self, frame: Frame) -> None:
        self.frame = frame
        self._masks = {}

    def chain(self, count: int) -> None:
        """The next forward appends `count` tokens to the trunk."""
        end = self.length + count
        self._set(Frame(self.length, count, self.length, np.arange(end), None))
        self.length = end

    def branches(
        self,
        start: int,
        positions: npt.NDArray[np.int64],
        visible: npt.NDArray[np.bool_],
    ) -> None:
        """The next forward writes parallel tokens to the scratch slots from `start` on.

        Args:
            start: first slot written; at least `length`.
            positions: [start + count] position of the token in every slot, new ones included.
            visible: [count, start + count] which slots each new token sees.
        """
        count = visible.shape[0]
        offsets = mx.array(positions[start:], dtype=mx.int32)
        self._set(Frame(start, count, offsets, positions, visible))

    @property
    def owed(self) -> int:
        """None: slots go back to any length."""
        return 0

    @property
    def needs_checkpoints(self) -> bool:
        """Forks can begin anywhere."""
        return False

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """[tokens] positions of the tokens of the pass in work."""
        return self.frame.positions[self.frame.start :]

    def append(self, count: int, *, whole: bool = False) -> None:  # noqa: ARG002
        """See `SequenceState`."""
        self.chain(count)

    def commit(self, length: int) -> None:
        """See `SequenceState`."""
        self.trim(length)

    def suspend(self) -> int:
        """See `SequenceState`; the rows stay where a pass over the same tokens writes them."""
        count = self.frame.count
        self.trim(self.frame.start)
        return count

    def resume(self, suspended: int) -> None:
        """See `SequenceState`."""
        self.chain(suspended)

    def resumable(self, length: int) -> int:
        """See `SequenceState`."""
        return min(length, self.length)

    def checkpoint(self) -> None:
        """Nothing: forks can begin anywhere."""

    def fork(self, length: int) -> "KVStore":
        """A store with the first `length` tokens; what either does next, the other never sees.

        They share buffers until one of them writes: MLX writes in place only what nobody
        else holds.
        """
        new = self._empty(length)
        new.share(self, length)
        return new

    def _empty(self, fork_length: int) -> "KVStore":
        """A store for a fork of so many tokens."""
        del fork_length
        return KVStore([cache.window for cache in self.caches], bucketed=self._bucketed)

    def share(self, other: "KVStore", length: int) -> None:
        """Begin with the first `length` tokens of another store of the same layers."""
        if not 0 <= length <= other.length:
            raise ValueError(f"cannot fork {length} of {other.length} tokens")
        slots = round_to_bucket(length)
        for theirs, cache in zip(other.caches, self.caches, strict=True):
            if slots and theirs.keys is not None and theirs.values is not None:
                cache.keys = theirs.keys[..., :slots, :]
                cache.values = theirs.values[..., :slots, :]
        self.length = length

    def dump(self, length: int) -> dict[str, mx.array]:
        """See `SequenceState`: "layer.keys" and "layer.values", [1, heads, length, size]."""
        found = {}
        for layer, cache in enumerate(self.caches):
            if cache.keys is None or cache.values is None:
                raise ValueError(f"an empty cache has no {length} tokens")
            found[f"{layer}.keys"] = mx.contiguous(cache.keys[..., :length, :])
            found[f"{layer}.values"] = mx.contiguous(cache.values[..., :length, :])
        return found

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """See `SequenceState`."""
        lengths = {array.shape[2] for array in arrays.values()}
        if len(arrays) != 2 * len(self.caches) or len(lengths) > 1 or self.length:
            raise ValueError(f"{len(arrays)} arrays of {lengths} tokens do not fit here")
        for layer, cache in enumerate(self.caches):
            cache.keys = _store_rows(None, arrays[f"{layer}.keys"], 0)
            cache.values = _store_rows(None, arrays[f"{layer}.values"], 0)
        self.length = max(lengths, default=0)

    def take(self, buffers: Sequence[tuple[mx.array, mx.array]], length: int) -> None:
        """Begin with buffers of keys and values, [1, heads, slots, size] per layer.

        They are not copied: nobody else may hold them. Their first `length` slots are tokens;
        this store must be empty.
        """
        if len(buffers) != len(self.caches) or self.length:
            raise ValueError(f"{len(buffers)} layers for {len(self.caches)} with {self.length}")
        for cache, (keys, values) in zip(self.caches, buffers, strict=True):
            cache.keys, cache.values = keys, values
        self.length = length

    def write(self, start: int, rows: Sequence[tuple[mx.array, mx.array]]) -> None:
        """Make these the trunk's last rows, from slot `start` on: [1, heads, tokens, size] each.

        The slots behind them are left as they are.
        """
        if start > self.length:
            raise ValueError(f"cannot write at {start} behind {self.length} tokens")
        for cache, (keys, values) in zip(self.caches, rows, strict=True):
            cache.keys = _store_rows(cache.keys, keys, start)
            cache.values = _store_rows(cache.values, values, start)
        self.length = start + rows[0][0].shape[2]

    @property
    def nbytes(self) -> int:
        """Memory of all buffers, used or not."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def bytes_per_token(self) -> int:
        """See `SequenceState`."""
        return sum(array.nbytes // array.shape[2] for array in self.arrays)

    def trim(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot trim {self.length} tokens to {length}")
        self.length = length

    def move(self, slots: Sequence[int]) -> None:
        """Append the tokens in these scratch slots to the trunk."""
        indices = mx.array(list(slots), dtype=mx.int32)
        for cache in self.caches:
            cache.move(indices, self.length)
        self.length += len(slots)

    def key_length(self, end: int) -> int:
        """How many slots attention is given when `end` of them are in use.

        MLX on CUDA builds a plan for every new key length, about 25 ms each; buckets make
        lengths recur. Not for a single token that sees them all: it has kernels for any
        length, and with a mask none. Elsewhere the exact length is cheaper.
        """
        exact = not self._bucketed or self._sees_all(self._narrowest)
        return end if exact else round_to_bucket(end)

    def _sees_all(self, window: int | None) -> bool:
        """Whether the frame is one token that, with this window, sees everything before it."""
        frame = self.frame
        windowed = window is not None and frame.start + frame.count > window
        return frame.visible is None and frame.count == 1 and not windowed

    def mask(self, window: int | None, *, as_array: bool) -> mx.array | str | None:
        """The mask of the current frame: None, "causal", or bool [count, reach]."""
        key = (window, as_array)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, as_array=as_array)
        return self._masks[key]

    def _build_mask(self, window: int | None, *, as_array: bool) -> mx.array | str | None:
        frame = self.frame
        end = frame.start + frame.count
        padding = self.key_length(end) - end
        if self._sees_all(window) and not padding:
            return None
        windowed = window is not None and end > window
        if frame.visible is None and not (windowed or self._bucketed or as_array):
            return "causal"
        queries = frame.positions[frame.start :, None]
        visible = queries >= frame.positions[None] if frame.visible is None else frame.visible
        if window is not None:
            visible = visible & (queries - frame.positions[None] < window)
        padded: Any = np.pad(visible, ((0, 0), (0, padding)))
        return mx.array(padded)

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers."""
        return [array for cache in self.caches for array in cache.state]

    def evaluate(self) -> None:
        """Compute what has been stored so far (after a prefill chunk whose logits are unused)."""
        mx.eval(self.arrays)


def windows_of(model: Any) -> list[int | None]:
    """The attention window per layer of an mlx-lm model, None where attention is full.

    Raises:
        ModelError: a layer keeps something else (a recurrent state, chunks, ...).
    """
    windows: list[int | None] = []
    for cache in make_prompt_cache(model):
        if type(cache) is KVCache:
            windows.append(None)
        elif type(cache) is RotatingKVCache and cache.keep == 0:
            windows.append(cache.max_size)
        else:
            raise ModelError(
                f"a layer keeps its state in a {type(cache).__name__}: such models verify drafts, "
                "but cannot draft or be distilled"
            )
    return windows
