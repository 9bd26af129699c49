"""KV memory in slots: one buffer per layer with an append-only trunk, then scratch slots.

A `KVStore` sets the `Span` of each forward pass (`engine.batch`): a chain (a prompt, a
verification) or a row of parallel branches, each token with its own position and its own view of
the slots; branching never copies KV.

Sliding-window layers keep all slots here; targets keep only the window (`kv.window`).
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from protocol.decoding.token_tree import TokenTree
from services.engine.batch import BUCKET, Span, round_to_bucket, tree_span
from services.kernels.cuda import kv_rows
from services.kv.pool import (
    Pair,
    ResidentSlots,
    SlotMemory,
    copy_slots,
    grow,
    store_rows,
)
from services.kv.state import PassSize
from services.mlx.launching import launch


class SlotCache:
    """One layer's keys and values, in the form of an mlx-lm KV cache.

    mlx-lm asks it for the mask (`make_mask`), for the RoPE offset (`offset`) and to store keys and
    values (`update_and_fetch`); all three follow from the `Span` of its store.
    """

    def __init__(self, store: "KVStore", window: int | None) -> None:
        # The store owns its caches; a cycle would keep a closed sequence's KV alive until the next
        # garbage collection.
        self._store: KVStore = weakref.proxy(store)
        self.window = window
        self.keys: mx.array | None = None
        """[1, heads, slots, size], like the values; None while the store has other memory."""
        self.values: mx.array | None = None

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
        self._store.gather()
        span = self._store.span
        self.keys, self.values = stored = (
            store_rows(self.keys, keys, span.start),
            store_rows(self.values, values, span.start),
        )
        key_length = self._store.key_length(span.end)
        return stored[0][..., :key_length, :], stored[1][..., :key_length, :]

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """Return the buffers up to the pass's end, for layers that share another's KV."""
        if self.keys is None or self.values is None:
            return None, None
        limit = self._store.key_length(self._store.span.end)
        return self.keys[..., :limit, :], self.values[..., :limit, :]

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for evaluation."""
        return [array for array in (self.keys, self.values) if array is not None]


class KVStore:
    """The caches of all layers of one sequence, and the span they share.

    `length` is the number of trunk tokens; slots from there on are scratch. Slots can be rewound to
    any length and forked anywhere, and a token can attend to any of them.
    """

    owed = 0
    most_owed = 0
    needs_checkpoints = False
    takes_trees = True
    pass_size = PassSize()

    def __init__(self, windows: Sequence[int | None], *, bucketed: bool) -> None:
        self.length = 0
        self.caches = [SlotCache(self, window) for window in windows]
        self._bucketed = bucketed
        self._narrowest = min((window for window in windows if window is not None), default=None)
        self._masks: dict[tuple[int | None, bool], mx.array | str | None] = {}
        self.span = Span(0, np.zeros(0, np.int64))
        self.written: list[mx.array] | None = None
        """Per layer, an array that is computed once the pass has written its rows in place."""
        self._is_shared = False
        """True if other stores may hold its buffers."""
        self._is_owned = False
        """True if kernels write into its buffers in place, unless they are shared."""
        self.memory: SlotMemory | None = None
        """Where kernels write its slots in place, if they do."""
        slots = all(type(cache) is SlotCache for cache in self.caches)
        self.is_plain = slots and not bucketed
        """True if every layer keeps all slots up to the pass's end."""
        self.windows = [window or 0 for window in windows]
        """Each layer's attention window, 0 for none."""

    def reside(self, heads: int, size: int, dtype: mx.Dtype) -> ResidentSlots:
        """Move to buffers of KV heads of this size and type that CPU kernels write in place."""
        present = self.memory
        if isinstance(present, ResidentSlots) and present.slots >= self.span.end:
            return present
        self.gather()
        shape = (1, heads, round_to_bucket(self.span.end), size)
        for cache in self.caches:
            cache.keys, cache.values = (
                copy_slots(buffer, shape, dtype) for buffer in (cache.keys, cache.values)
            )
        self.memory = memory = ResidentSlots(self.vacate())
        self._is_shared = False
        return memory

    def gather(self) -> None:
        """Return the slots to arrays of MLX, which anyone may hold."""
        memory, self.memory = self.memory, None
        if memory is not None:
            self._put(memory.leave(max(self.length, self.span.end)))

    def vacate(self) -> list[Pair]:
        """Give the buffers of all layers to other memory."""
        buffers = self.buffers
        for cache in self.caches:
            cache.keys = cache.values = None
        return buffers

    def _put(self, buffers: Sequence[Pair]) -> None:
        for cache, (keys, values) in zip(self.caches, buffers, strict=True):
            cache.keys, cache.values = keys, values

    def place(self, span: Span) -> None:
        """Prepare a forward pass over these rows; the trunk stays as long as it is."""
        if self.written:
            launch(self.written[-1])  # its result may not have been read
        self.span, self.written = span, None
        self._masks = {}

    def chain(self, count: int) -> None:
        """Prepare a forward pass that appends `count` tokens to the trunk."""
        end = self.length + count
        self.place(Span(self.length, np.arange(end)))
        self.length = end

    def append_tree(self, tree: TokenTree) -> None:
        """Begin a pass over the tokens of a tree or chain."""
        if tree.is_chain:
            self.chain(len(tree))
            return
        self.place(tree_span(self.length, tree))
        self.length = self.span.end

    def commit_rows(self, rows: Sequence[int]) -> None:
        """End a pass over a tree with the accepted rows."""
        start = self.length = self.span.start
        self.move([start + row for row in rows])

    def append(self, count: int, *, whole: bool = False) -> None:  # noqa: ARG002
        """Begin a pass over the owed tokens and `count` new ones."""
        self.chain(count)

    def commit(self, length: int) -> None:
        """End the pass with `length` tokens accepted."""
        self.trim(length)

    def suspend(self) -> int:
        """Undo the pass; its rows stay where a pass over the same tokens would write them."""
        count = self.span.count
        self.trim(self.span.start)
        return count

    def resume(self, suspended: int) -> None:
        """Redo a suspended pass."""
        self.chain(suspended)

    def resumable(self, length: int) -> int:
        """Return how many of the first `length` tokens a fork can keep."""
        return min(length, self.length)

    def checkpoint(self, *, ends_turn: bool = False) -> None:
        """Do nothing: forks can start anywhere."""

    def fork(self, length: int) -> "KVStore":
        """Return a store with the first `length` tokens, independent of this one.

        Both share buffers until one of them writes: MLX writes in place only to buffers with a
        single reference, and our kernels only after `own`.
        """
        new = self._empty(length)
        new.share(self, length)
        return new

    def _empty(self, fork_length: int) -> "KVStore":  # noqa: ARG002
        """Return a store for a fork of `fork_length` tokens."""
        return KVStore([cache.window for cache in self.caches], bucketed=self._bucketed)

    def share(self, other: "KVStore", length: int) -> None:
        """Start with the first `length` tokens of another store of the same layers."""
        if not 0 <= length <= other.length:
            raise ValueError(f"cannot fork {length} of {other.length} tokens")
        other.gather()
        slots = round_to_bucket(length)
        if slots:
            for cache, theirs in zip(self.caches, other.caches, strict=True):
                if theirs.keys is not None and theirs.values is not None:
                    cache.keys = theirs.keys[..., :slots, :]
                    cache.values = theirs.values[..., :slots, :]
            self._is_shared = other._is_shared = True
        self.length = length

    def own(self) -> None:
        """Make its buffers exclusive, so that they can be written in place."""
        if self._is_shared:
            # With two inputs MLX always allocates a new array.
            copies = [mx.contiguous(mx.maximum(array, array)) for array in self.arrays]
            self._put(list(zip(copies[::2], copies[1::2], strict=True)))
        self._is_shared, self._is_owned = False, True

    def widen(self, slots: int) -> None:
        """Grow the buffers to this many slots."""
        for cache in self.caches:
            cache.keys, cache.values = grow(cache.keys, slots), grow(cache.values, slots)

    def dump(self, length: int) -> dict[str, mx.array]:
        """Return "layer.keys" and "layer.values", [1, heads, length, size], of the first tokens."""
        self.gather()
        if len(self.buffers) < len(self.caches):
            raise ValueError(f"an empty cache has no {length} tokens")
        return {
            f"{layer}.{name}": mx.contiguous(array[..., :length, :])
            for layer, pair in enumerate(self.buffers)
            for name, array in zip(("keys", "values"), pair, strict=True)
        }

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Start with the arrays that `dump` returned."""
        lengths = {array.shape[2] for array in arrays.values()}
        if len(arrays) != 2 * len(self.caches) or len(lengths) > 1 or self.length:
            raise ValueError(f"{len(arrays)} arrays of {lengths} tokens do not fit here")
        stored = {name: store_rows(None, array, 0) for name, array in arrays.items()}
        self._put([(stored[f"{n}.keys"], stored[f"{n}.values"]) for n in range(len(self.caches))])
        self.length = max(lengths, default=0)

    def take(self, buffers: Sequence[Pair], length: int) -> None:
        """Start with buffers of keys and values, [1, heads, slots, size] per layer.

        They are not copied, so the caller must give up its references. Their first `length` slots
        are tokens; this store must be empty.
        """
        if len(buffers) != len(self.caches) or self.length:
            raise ValueError(f"{len(buffers)} layers for {len(self.caches)} with {self.length}")
        self._put(buffers)
        self.length = length

    def write(self, start: int, rows: Sequence[Pair]) -> None:
        """Replace the trunk's rows from slot `start` on by these: [1, heads, tokens, size] each.

        The slots after them are left unchanged.
        """
        if start > self.length:
            raise ValueError(f"cannot write at slot {start}: the sequence has {self.length} tokens")
        self.gather()
        for cache, (keys, values) in zip(self.caches, rows, strict=True):
            cache.keys = store_rows(cache.keys, keys, start)
            cache.values = store_rows(cache.values, values, start)
        self.length = start + rows[0][0].shape[2]

    @property
    def nbytes(self) -> int:
        """Memory of all buffers, used or not."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that another token adds once buffers have grown."""
        return sum(array.nbytes // array.shape[2] for array in self.arrays)

    def trim(self, length: int) -> None:
        """Drop all tokens from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot trim {self.length} tokens to {length}")
        if length <= self.span.start:
            self.written = None  # the rows are no longer needed
        self.length = length

    def move(self, slots: Sequence[int]) -> None:
        """Append the tokens in these scratch slots, which may overlap, to the trunk."""
        pairs = enumerate(slots, start=self.length)
        stay = next((i for i, (to, slot) in enumerate(pairs) if slot != to), len(slots))
        self.length += stay
        if stay < len(slots):
            if self.memory is not None:
                self.memory.move(slots[stay:], self.length)
            else:
                self._move_behind(mx.array(list(slots[stay:]), dtype=mx.int32))
            self.length += len(slots) - stay

    def _move_behind(self, slots: mx.array) -> None:
        """Copy the rows in these slots to those after the trunk."""
        if len(self.buffers) < len(self.caches):
            raise ValueError("an empty cache has no slots to move")
        if self._is_owned and not self._is_shared:
            launch([kv_rows.move(*pair, slots, self.length) for pair in self.buffers])
            return
        for buffer in self.arrays:
            buffer[..., self.length : self.length + slots.size, :] = mx.take(buffer, slots, axis=2)

    @property
    def buffers(self) -> list[Pair]:
        """Keys and values of each layer, in arrays of MLX."""
        pairs = [(cache.keys, cache.values) for cache in self.caches]
        return [(keys, values) for keys, values in pairs if keys is not None and values is not None]

    def key_length(self, end: int) -> int:
        """Return how many slots attention gets when `end` of them are in use.

        MLX on CUDA builds a plan for every new key length, about 25 ms each; buckets make lengths
        recur. A single token that attends to all slots needs none: MLX has kernels for any length,
        but only without a mask. Elsewhere the exact length is cheaper.
        """
        return (
            end if not self._bucketed or self._sees_all(self._narrowest) else round_to_bucket(end)
        )

    def _sees_all(self, window: int | None) -> bool:
        """Return True if the pass is one token that attends to all before it under this window."""
        span = self.span
        return span.visible is None and span.count == 1 and (window is None or span.end <= window)

    def mask(self, window: int | None, *, as_array: bool) -> mx.array | str | None:
        """Return the mask of the current pass: None, "causal", or bool [rows, reach]."""
        key = (window, as_array)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, as_array=as_array)
        return self._masks[key]

    def _build_mask(self, window: int | None, *, as_array: bool) -> mx.array | str | None:
        span = self.span
        padding = self.key_length(span.end) - span.end
        if self._sees_all(window) and not padding:
            return None
        windowed = window is not None and span.end > window
        recurs = not padding and span.count % BUCKET == 0
        if span.visible is None and not (windowed or as_array) and (recurs or not self._bucketed):
            return "causal"
        padded: Any = np.pad(span.find_visible(window), ((0, 0), (0, padding)))
        return mx.array(padded)

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers, but those in a table."""
        if self.memory is not None:
            return list(self.memory.arrays)
        return [array for cache in self.caches for array in cache.state]

    @property
    def milestones(self) -> list[mx.array]:
        """One array per layer that is computed once the pass has stored its rows."""
        if self.memory is not None:
            return self.memory.milestones
        return self.written or [cache.keys for cache in self.caches if cache.keys is not None]

    def evaluate(self) -> None:
        """Evaluate what has been stored (after a prefill chunk whose logits are unused)."""
        if self.memory is not None:
            self.memory.evaluate()
        else:
            mx.eval([*self.arrays, *(self.written or [])])
