"""KV memory in slots: one buffer per layer with an append-only trunk, then scratch slots.

A `KVStore` sets the `Span` of each forward pass (`engine.batch`): a chain (a prompt, a
verification) or a row of parallel branches, each token with its own position and its own view of
the slots; branching never copies KV.

Sliding-window layers keep all slots here; targets keep only the window (`kv.window`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from protocol.decoding.token_tree import TokenTree
from services.engine.batch import Span, tree_span
from services.kernels.cuda import kv_rows
from services.kv.resident import ResidentSlots
from services.kv.slots import BUCKET, SlotCache, grow, round_to_bucket, store_rows
from services.kv.state import PassSize
from services.mlx.launching import launch

if TYPE_CHECKING:
    from services.engine.slot_table import Seat


class KVStore:
    """The caches of all layers of one sequence, and the span they share.

    `length` is the number of trunk tokens; slots from there on are scratch.
    """

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
        self.seat: Seat | None = None
        """Its place in a slot table while it shares passes on a GPU."""
        self.resident: ResidentSlots | None = None
        """Set while CPU kernels may write its slots in place."""
        slots = all(type(cache) is SlotCache for cache in self.caches)
        self.is_plain = slots and not bucketed
        """True if every layer keeps all slots up to the pass's end."""
        self.windows = [window or 0 for window in windows]
        """Each layer's attention window, 0 for none."""

    def reside(self, heads: int, size: int, dtype: mx.Dtype) -> ResidentSlots:
        """Move to buffers of KV heads of this size and type that CPU kernels write in place."""
        self.leave_table()
        if self.resident is None or self.resident.slots < self.span.end:
            shape = (1, heads, round_to_bucket(self.span.end), size)
            self.resident = ResidentSlots(self.caches, shape, dtype)
        return self.resident

    def hand_out(self) -> None:
        """Return the buffers to MLX before a caller takes, and perhaps keeps, a reference."""
        self.resident = None
        self.leave_table()

    def leave_table(self) -> None:
        """Move the slots out of the shared table into own buffers."""
        seat, self.seat = self.seat, None
        if seat is not None:
            length = max(self.length, self.span.end)
            for cache, (keys, values) in zip(self.caches, seat.leave(length), strict=True):
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

    @property
    def takes_trees(self) -> bool:
        """True: any token can attend to any slots."""
        return True

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

    @property
    def owed(self) -> int:
        """Always 0: slots can be rewound to any length."""
        return 0

    @property
    def most_owed(self) -> int:
        """Always 0, as nothing is ever owed."""
        return 0

    @property
    def needs_checkpoints(self) -> bool:
        """False: forks can start anywhere."""
        return False

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

    def _empty(self, fork_length: int) -> "KVStore":
        """Return a store for a fork of `fork_length` tokens."""
        del fork_length
        return KVStore([cache.window for cache in self.caches], bucketed=self._bucketed)

    def share(self, other: "KVStore", length: int) -> None:
        """Start with the first `length` tokens of another store of the same layers."""
        if not 0 <= length <= other.length:
            raise ValueError(f"cannot fork {length} of {other.length} tokens")
        slots = round_to_bucket(length)
        for theirs, cache in zip(other.caches, self.caches, strict=True):
            if slots and theirs.keys is not None and theirs.values is not None:
                cache.keys = theirs.keys[..., :slots, :]
                cache.values = theirs.values[..., :slots, :]
        self.length = length
        if slots:
            self._is_shared = other._is_shared = True

    def own(self) -> None:
        """Make its buffers exclusive, so that they can be written in place."""
        if self._is_shared:
            for cache in self.caches:
                cache.keys, cache.values = (
                    # With two inputs MLX always allocates a new array.
                    buffer if buffer is None else mx.contiguous(mx.maximum(buffer, buffer))
                    for buffer in (cache.keys, cache.values)
                )
        self._is_shared = False

    def widen(self, slots: int) -> None:
        """Grow the buffers to this many slots."""
        for cache in self.caches:
            cache.keys, cache.values = grow(cache.keys, slots), grow(cache.values, slots)

    def dump(self, length: int) -> dict[str, mx.array]:
        """Return "layer.keys" and "layer.values", [1, heads, length, size], of the first tokens."""
        arrays = {}
        for layer, cache in enumerate(self.caches):
            if cache.keys is None or cache.values is None:
                raise ValueError(f"an empty cache has no {length} tokens")
            arrays[f"{layer}.keys"] = mx.contiguous(cache.keys[..., :length, :])
            arrays[f"{layer}.values"] = mx.contiguous(cache.values[..., :length, :])
        return arrays

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Start with the arrays that `dump` returned."""
        lengths = {array.shape[2] for array in arrays.values()}
        if len(arrays) != 2 * len(self.caches) or len(lengths) > 1 or self.length:
            raise ValueError(f"{len(arrays)} arrays of {lengths} tokens do not fit here")
        for layer, cache in enumerate(self.caches):
            cache.keys = store_rows(None, arrays[f"{layer}.keys"], 0)
            cache.values = store_rows(None, arrays[f"{layer}.values"], 0)
        self.length = max(lengths, default=0)

    def take(self, buffers: Sequence[tuple[mx.array, mx.array]], length: int) -> None:
        """Start with buffers of keys and values, [1, heads, slots, size] per layer.

        They are not copied, so the caller must give up its references. Their first `length` slots
        are tokens; this store must be empty.
        """
        if len(buffers) != len(self.caches) or self.length:
            raise ValueError(f"{len(buffers)} layers for {len(self.caches)} with {self.length}")
        for cache, (keys, values) in zip(self.caches, buffers, strict=True):
            cache.keys, cache.values = keys, values
        self.length = length

    def write(self, start: int, rows: Sequence[tuple[mx.array, mx.array]]) -> None:
        """Replace the trunk's rows from slot `start` on by these: [1, heads, tokens, size] each.

        The slots after them are left unchanged.
        """
        if start > self.length:
            raise ValueError(f"cannot write at slot {start}: the sequence has {self.length} tokens")
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

    @property
    def pass_size(self) -> PassSize:
        """Nothing in addition to the slots."""
        return PassSize()

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
            if self.resident is not None:
                self.resident.move(slots[stay:], self.length)
            else:
                self._move_behind(mx.array(list(slots[stay:]), dtype=mx.int32))
            self.length += len(slots) - stay

    def _move_behind(self, slots: mx.array) -> None:
        """Copy the rows in these slots to those after the trunk."""
        if self.seat is not None:
            self.seat.move(slots, self.length)
        elif self.written is not None and not self._is_shared:  # written in place
            launch(
                [kv_rows.move(keys, values, slots, self.length) for keys, values in self._buffers]
            )
        else:
            for cache in self.caches:
                cache.move(slots, self.length)

    @property
    def _buffers(self) -> list[tuple[mx.array, mx.array]]:
        pairs = [(cache.keys, cache.values) for cache in self.caches]
        return [(keys, values) for keys, values in pairs if keys is not None and values is not None]

    def key_length(self, end: int) -> int:
        """Return how many slots attention gets when `end` of them are in use.

        MLX on CUDA builds a plan for every new key length, about 25 ms each; buckets make lengths
        recur. A single token that attends to all slots needs none: MLX has kernels for any length,
        but only without a mask. Elsewhere the exact length is cheaper.
        """
        exact = not self._bucketed or self._sees_all(self._narrowest)
        return end if exact else round_to_bucket(end)

    def _sees_all(self, window: int | None) -> bool:
        """Return True if the pass is one token that attends to all before it under this window."""
        span = self.span
        windowed = window is not None and span.end > window
        return span.visible is None and span.count == 1 and not windowed

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
        """All buffers."""
        return [array for cache in self.caches for array in cache.state]

    @property
    def milestones(self) -> list[mx.array]:
        """One array per layer that is computed once the pass has stored its rows."""
        if self.seat is not None:
            return self.seat.milestones
        if self.written is not None:
            return self.written
        return [cache.keys for cache in self.caches if cache.keys is not None]

    def evaluate(self) -> None:
        """Evaluate what has been stored (after a prefill chunk whose logits are unused)."""
        if self.seat is not None:
            self.seat.evaluate()
        else:
            mx.eval([*self.arrays, *(self.written or [])])
