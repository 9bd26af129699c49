"""The state of a sequence with several kinds of layers.

Layers of keys and values are slots (`kv.cache`), sliding layers hold their window (`kv.window`);
both rewind by dropping their last rows. All others keep mlx-lm's own cache. MLX arrays are values,
so a copy of such a cache before a pass is a few references. If part of a chain is rejected, the
cache is either recomputed for the accepted rows (`kv.replay`), or the whole sequence returns to the
start of the pass: the accepted tokens are then *owed*, and the next pass starts with them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from protocol.decoding.token_tree import TokenTree
from services.engine.batch import Span
from services.kv.cache import KVStore
from services.kv.checkpoints import Checkpoint, add_checkpoint, read_checkpoint
from services.kv.layer_copy import (
    copy_cache,
    copy_position,
    count_bytes,
    is_trimmable,
    restore_cache,
    split_arrays,
)
from services.kv.recording import Recording, record_pass
from services.kv.replay import ReplayPlan, size_pass
from services.kv.state import PassSize
from services.kv.window import WindowCache

_MOST_OWED = 16


@dataclass(frozen=True)
class _Mark:
    """The point at which the current pass began."""

    length: int
    owed: int
    others: list[Any]
    """A copy of each cache, or its offset where that suffices."""


@dataclass(frozen=True)
class _Suspended:
    """A pass of one token that was undone."""

    count: int
    others: list[Any]
    windows: list[int]


def flatten_caches(caches: Sequence[Any]) -> list[Any]:
    """Return the caches of all layers, with each `CacheList` expanded."""
    found: list[Any] = []
    for cache in caches:
        found += flatten_caches(cache.caches) if type(cache) is CacheList else [cache]
    return found


class LayeredState:
    """State of a sequence whose layers keep more than keys and values.

    Args:
        make_caches: creates empty mlx-lm caches for all layers.
        bucketed: as for `KVStore`.
        replay: how recurrent layers are recomputed; None to feed tokens again instead.
        own: True to replace mlx-lm's caches of keys and values by slots and windows.
    """

    def __init__(
        self,
        make_caches: Callable[[], Sequence[Any]],
        *,
        bucketed: bool,
        replay: ReplayPlan | None,
        own: bool,
    ) -> None:
        self._make_caches, self._bucketed, self._own = make_caches, bucketed, own
        self.replay = replay
        """How its recurrent layers are recomputed."""
        caches = make_caches()
        flat = flatten_caches(caches)
        slots = sum(type(cache) is KVCache for cache in flat) if own else 0
        self._slots = KVStore([None] * slots, bucketed=bucketed)
        self._windows: list[WindowCache] = []
        self._others: list[Any] = []
        unused = iter(self._slots.caches)
        self.caches = [self._adopt(cache, unused, own=own, bucketed=bucketed) for cache in caches]
        self._mark: _Mark | None = None
        self.recording: Recording | None = None
        """Inputs of the recurrent layers in the current pass."""
        self._checkpoints: list[Checkpoint] = []
        self.owed = 0

    def _adopt(self, cache: Any, unused: Iterator[Any], *, own: bool, bucketed: bool) -> Any:
        """Return the cache that replaces this one."""
        if type(cache) is CacheList:
            inner = [self._adopt(c, unused, own=own, bucketed=bucketed) for c in cache.caches]
            joined: Any = CacheList
            return joined(*inner)
        if own and type(cache) is KVCache:
            return next(unused)
        if own and type(cache) is RotatingKVCache:
            window = WindowCache(cache.max_size, cache.keep, bucketed=bucketed)
            self._windows.append(window)
            return window
        self._others.append(cache)
        return cache

    # ------------------------------------------------------------ passes

    @property
    def length(self) -> int:
        """Number of tokens, those of the current pass included."""
        return self._slots.length + self.owed

    @property
    def most_owed(self) -> int:
        """Number of owed tokens that can be fed along with others.

        CUDA compiles every new pass length, so there they are fed alone, in lengths that chains
        have anyway.
        """
        return 0 if self._bucketed else _MOST_OWED

    @property
    def needs_checkpoints(self) -> bool:
        """True: windows and recurrent states hold only the latest point."""
        return bool(self._windows or self._others)

    @property
    def span(self) -> Span:
        """The rows of the current pass."""
        return self._slots.span

    @property
    def others(self) -> list[Any]:
        """The caches of mlx-lm's own classes."""
        return self._others

    def append(self, count: int, *, whole: bool = False) -> None:
        """Begin a pass over the owed tokens and `count` new ones."""
        others = [copy_position(cache) for cache in self._others]
        self._mark = _Mark(self._slots.length, self.owed, others)
        self._slots.chain(self.owed + count)
        self.owed = 0
        # A single row cannot be rewound into.
        records = self.replay is not None and self._slots.span.count > 1 and not whole
        self.recording = record_pass(wanted=records, keeps_steps=True)

    @property
    def takes_trees(self) -> bool:
        """True if all layers are slots and windows; a recurrence cannot branch within a pass."""
        return not self._others

    def append_tree(self, tree: TokenTree) -> None:
        """Begin a pass over the tokens of a tree or chain."""
        if tree.is_chain:
            self.append(len(tree))
            return
        if self._others:
            raise ValueError("only slots and windows take trees, and this model has other layers")
        self._mark = _Mark(self._slots.length, 0, [])
        self._slots.append_tree(tree)
        for window in self._windows:
            window.begin_tree(self._slots.span)

    def commit_rows(self, rows: Sequence[int]) -> None:
        """End a pass over a tree with the accepted rows."""
        self._slots.commit_rows(rows)
        self._mark = None
        for window in self._windows:
            window.keep_rows(rows)
            window.compact()

    def commit(self, length: int) -> None:
        """End the pass with `length` tokens accepted."""
        mark, count = self._mark, self._slots.span.count
        if self.recording is not None:
            self.recording.stop()
        if length != self.length:
            if mark is None or not mark.length + mark.owed <= length < self.length:
                raise ValueError(f"cannot go back from {self.length} tokens to {length}")
            self._go_back(mark, length - mark.length, count)
        self._mark, self.recording = None, None
        for window in self._windows:
            window.compact()

    def _go_back(self, mark: _Mark, keep: int, count: int) -> None:
        """Keep the first `keep` rows of the pass."""
        exact = keep > mark.owed and self._go_back_exactly(keep, count)
        held = mark.length + keep if exact else mark.length
        self._slots.trim(held)
        for window in self._windows:
            window.cut(held)
        if not exact:
            self._restore(mark)
            self.owed = keep

    def _go_back_exactly(self, keep: int, count: int) -> bool:
        """Return True if every mlx-lm cache could be rewound to the first `keep` rows."""
        states = [cache for cache in self._others if not is_trimmable(cache)]
        if states:
            if self.replay is None or self.recording is None:
                return False
            self.replay.rewind(self._others, self.recording, keep)
        for cache in self._others:
            if is_trimmable(cache):
                cache.trim(count - keep)
        return True

    def _restore(self, mark: _Mark) -> None:
        for cache, before in zip(self._others, mark.others, strict=True):
            if is_trimmable(cache):
                cache.trim(cache.offset - before)
            else:
                restore_cache(cache, before)

    def suspend(self) -> _Suspended:
        """Undo the current pass so that `resume` can redo it."""
        mark, count = self._mark, self._slots.span.count
        if mark is None or mark.owed:
            raise ValueError("there is no pass to suspend")
        after = _Suspended(
            count, [copy_cache(c) for c in self._others], [w.length for w in self._windows]
        )
        self._slots.trim(mark.length)
        for window in self._windows:
            window.cut(mark.length)
        self._restore(mark)
        self._mark = None
        return after

    def resume(self, suspended: _Suspended) -> None:
        """Redo a suspended pass."""
        self.append(suspended.count)
        for cache, after in zip(self._others, suspended.others, strict=True):
            restore_cache(cache, after)
        for window, offset in zip(self._windows, suspended.windows, strict=True):
            window.cut(offset)

    # ------------------------------------------------------------ forks

    def checkpoint(self, *, ends_turn: bool = False) -> None:
        """Save this point so that forks can start here."""
        if self._mark is not None or self.owed:
            raise ValueError("a checkpoint can only be made between two passes")
        if not self._checkpoints or self._checkpoints[-1].length != self.length:
            add_checkpoint(self._checkpoints, self._capture(ends_turn=ends_turn))

    def _capture(self, *, ends_turn: bool = False) -> Checkpoint:
        windows = [window.capture() for window in self._windows]
        others = [copy_cache(cache) for cache in self._others]
        return Checkpoint(self._slots.length, windows, others, ends_turn)

    def _begin(self) -> int:
        """Return the number of tokens held when the current pass began."""
        return self._slots.length if self._mark is None else self._mark.length

    def resumable(self, length: int) -> int:
        """Return how many of the first `length` tokens a fork can keep."""
        points = [point.length for point in self._checkpoints if point.length <= length]
        held = min(length, self._begin())
        if self._can_fork(held):
            points.append(held)
        return max(points, default=0)

    def _can_fork(self, length: int) -> bool:
        """Return True if the present state can be rewound to this length."""
        if length == self._begin():
            return self._mark is None or all(isinstance(mark, dict) for mark in self._mark.others)
        return not self._others and all(window.can_cut(length) for window in self._windows)

    def fork(self, length: int) -> "LayeredState":
        """Return an independent state with the first `length` tokens."""
        new = self._empty()
        points = [point for point in self._checkpoints if point.length <= length]
        at = next((point for point in points if point.length == length), None)
        if at is None:
            if not self._can_fork(length):
                raise ValueError(f"cannot fork {length} of {self.length} tokens")
            at = self._capture()
            if self._mark is not None:
                at = Checkpoint(length, at.windows, self._mark.others)
        new._begin_at(at, self._slots, length)
        new._checkpoints = points
        return new

    def _empty(self) -> "LayeredState":
        return LayeredState(
            self._make_caches, bucketed=self._bucketed, replay=self.replay, own=self._own
        )

    def _begin_at(self, point: Checkpoint, slots: KVStore, length: int) -> None:
        self._slots.share(slots, length)
        self._restore_point(point, length)

    def _restore_point(self, point: Checkpoint, length: int) -> None:
        for window, snapshot in zip(self._windows, point.windows, strict=True):
            window.restore(snapshot)
            window.cut(length)
        for cache, copied in zip(self._others, point.others, strict=True):
            restore_cache(cache, copied)

    # ------------------------------------------------------------ memory

    @property
    def nbytes(self) -> int:
        """Memory in bytes; buffers that checkpoints share with the present state count once."""
        windows = sum(array.nbytes for window in self._windows for array in window.state)
        points = sum(point.nbytes for point in self._checkpoints)
        others = sum(count_bytes(copy_cache(cache)) for cache in self._others)
        return self._slots.nbytes + windows + others + points

    @property
    def bytes_per_token(self) -> int:
        """Bytes that another token adds; windows and recurrent states do not grow."""
        return self._slots.bytes_per_token

    @property
    def pass_size(self) -> PassSize:
        """Memory of one pass."""
        own = [count_bytes(copy_cache(c)) for c in self._others if not is_trimmable(c)]
        return size_pass(own, self.replay, sum(w.growth for w in self._windows))

    @property
    def milestones(self) -> list[mx.array]:
        """An array of each layer as the last pass leaves it."""
        arrays: list[mx.array] = []
        for cache in flatten_caches(self.caches):
            leaves: Any = tree_flatten(vars(cache))
            arrays += [leaf for _, leaf in leaves if isinstance(leaf, mx.array)][:1]
        return arrays

    def evaluate(self) -> None:
        """Evaluate everything that has been stored."""
        copies = [copy_cache(cache) for cache in self._others]
        mx.eval(self._slots.arrays, [window.state for window in self._windows], copies)

    def dump(self, length: int) -> dict[str, mx.array]:
        """Return the slots' arrays, and "points" in JSON with its own arrays."""
        points = [point for point in self._checkpoints if point.length < length]
        points += self.fork(length)._points_at(length)
        arrays: list[mx.array] = []
        plain = [split_arrays(vars(point), arrays) for point in points]
        text = json.dumps(plain).encode()
        found = {f"slots.{name}": array for name, array in self._slots.dump(length).items()}
        found |= {f"points.{index}": mx.contiguous(array) for index, array in enumerate(arrays)}
        return found | {"points": mx.array(np.frombuffer(text, np.uint8))}

    def _points_at(self, length: int) -> list[Checkpoint]:
        """Return this state, which has `length` tokens, as a checkpoint."""
        return [self._capture()] if self._slots.length == length else []

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Start with the arrays that `dump` returned."""
        content: Any = np.array(arrays["points"])
        numbered = {
            int(name.removeprefix("points.")): array
            for name, array in arrays.items()
            if name.startswith("points.")
        }
        points = [read_checkpoint(p, numbered) for p in json.loads(content.tobytes())]
        slots = {
            name.removeprefix("slots."): array
            for name, array in arrays.items()
            if name.startswith("slots.")
        }
        last = points[-1]
        if slots:
            self._slots.load(slots)
        if self._slots.length not in (0, last.length):
            raise ValueError(f"{self._slots.length} slots and a state of {last.length} tokens")
        self._slots.length = last.length
        self._restore_point(last, last.length)
        self._checkpoints = points[:-1]

    def take(self, buffers: Sequence[tuple[mx.array, mx.array]], length: int) -> None:
        """Start with the given keys and values of `length` tokens."""
        layers = flatten_caches(self.caches)
        if self._others or len(buffers) != len(layers) or self.length:
            raise ValueError(f"{len(buffers)} layers for {len(layers)} with {self.length}")
        slots = []
        for layer, (keys, values) in zip(layers, buffers, strict=True):
            if isinstance(layer, WindowCache):
                layer.take(keys, values, length)
            else:
                slots.append((keys, values))
        self._slots.take(slots, length)
