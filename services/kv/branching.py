"""Recurrent states and slots of a drafter's sequence, whose branches advance as one batch.

Every branch needs its own recurrent state. The branches of one depth form a batch: one token each,
[branches, 1], with states [branches, ...] made by indexing, since MLX arrays are values. Attention
layers keep their rows in slots, as in models without recurrent layers (`kv.cache`), and give the
same slots to every branch, each under its own mask.

The trunk can be rewound to any token of its last passes; their recurrences are recomputed
(`kv.replay`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from protocol.decoding.token_tree import TokenTree
from services.engine.batch import Span
from services.kv.cache import KVStore, SlotCache
from services.kv.recording import Recording, record_pass
from services.kv.replay import ReplayPlan, size_pass
from services.kv.state import PassSize

_PASSES = 8
"""Trunk passes that can be rewound."""
_MOST_RECORDED = 65
"""Longest pass that is recorded, in tokens; longer ones are prompts."""

States = list[list[mx.array | None]]
"""The arrays of each recurrent layer, [1 or branches, ...]."""


class _BranchSlotCache(SlotCache):
    """An attention layer that takes a row of tokens, or a batch with one token per branch."""

    in_batch = False

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of the row, or [branches, 1, 1, slots]."""
        if not self.in_batch:
            return super().make_mask(n, return_array=return_array, window_size=window_size)
        mask: Any = self._store.mask(window_size or self.window, as_array=True)
        count = self._store.span.count
        if mask is None:
            return None
        rows: mx.array = mask.reshape(count, 1, 1, -1)
        return rows

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the rows of a batch next to each other; every branch gets all slots."""
        if not self.in_batch:
            return super().update_and_fetch(keys, values)
        rows = super().update_and_fetch(keys.swapaxes(0, 2), values.swapaxes(0, 2))
        batch = keys.shape[0]
        shared = [mx.broadcast_to(array, (batch, *array.shape[1:])) for array in rows]
        return shared[0], shared[1]


@dataclass
class _Pass:
    """A pass over the trunk."""

    start: int
    count: int
    recording: Recording
    end: States


@dataclass
class _Depth:
    """One depth of the tree."""

    start: int
    """First scratch slot of the depth."""
    states: States


class BranchingState:
    """The state of a drafter's sequence with recurrent layers, used in place of a `KVStore`.

    Args:
        make_caches: creates empty mlx-lm caches, `KVCache` and `ArraysCache` only.
        plan: how the recurrent layers are recomputed.
        bucketed: as for `KVStore`.
    """

    needs_checkpoints = True
    owed = 0
    most_owed = 0

    def __init__(
        self, make_caches: Callable[[], Sequence[Any]], plan: ReplayPlan, *, bucketed: bool
    ) -> None:
        self._make_caches, self._plan, self._bucketed = make_caches, plan, bucketed
        natives = make_caches()
        slots = sum(type(cache) is KVCache for cache in natives)
        self._store = KVStore([None] * slots, bucketed=bucketed)
        self._slots = [_BranchSlotCache(self._store, None) for _ in range(slots)]
        self._store.caches = list[SlotCache](self._slots)
        unused = iter(self._slots)
        self.caches: list[Any] = [
            next(unused) if type(cache) is KVCache else cache for cache in natives
        ]
        self._recurrent: list[Any] = [cache for cache in natives if type(cache) is ArraysCache]
        self._points: dict[int, States] = {0: self._now()}
        """Length -> states after that many tokens."""
        self._passes: list[_Pass] = []
        self._tree: list[_Depth] = []
        self._recording: Recording | None = None
        self.is_batched = False
        """True if the current pass is a batch with one token per branch."""
        self._open: Callable[[], None] | None = None
        """Stores what the current pass left in the caches."""

    # ------------------------------------------------------------ passes

    @property
    def length(self) -> int:
        """Number of trunk tokens."""
        return self._store.length

    @property
    def span(self) -> Span:
        """The rows of the current pass."""
        return self._store.span

    def chain(self, count: int) -> None:
        """Prepare a forward pass that appends `count` tokens to the trunk."""
        self._settle()
        start = self.length
        self._set(self._states_at(start), in_batch=False)
        self._tree = []
        self._store.chain(count)
        self._recording = record_pass(wanted=1 < count <= _MOST_RECORDED)
        recording = self._recording

        def settle() -> None:
            end = self._points[start + count] = self._now()
            if recording is not None:
                self._passes.append(_Pass(start, count, recording, end))
                del self._passes[:-_PASSES]
            self._forget_old()

        self._open = settle

    def append(self, count: int, *, whole: bool = False) -> None:
        """Begin a pass over the owed tokens and `count` new ones."""
        del whole
        self.chain(count)

    def place(self, span: Span) -> None:
        """Prepare a pass over one token per branch; the first depth is right after the trunk."""
        self._settle()
        if span.start == self.length:
            self._tree = []
            states = self._gather([int(position) for position in span.own_positions])
        else:
            states = self._tree[-1].states
        self._set(states, in_batch=True)
        record_pass(wanted=False)
        self._store.place(span)
        self._open = lambda: self._tree.append(_Depth(span.start, self._now()))

    def _settle(self) -> None:
        """Store the results of the current pass, which has run."""
        if self._recording is not None:
            self._recording.stop()
        settle, self._open, self._recording = self._open, None, None
        if settle is not None:
            settle()

    def _now(self) -> States:
        return [list(cache.cache) for cache in self._recurrent]

    def _set(self, states: States, *, in_batch: bool) -> None:
        for cache, arrays in zip(self._recurrent, states, strict=True):
            cache.cache = [*arrays]
        self.is_batched = in_batch
        for slots in self._slots:
            slots.in_batch = in_batch

    def _gather(self, lengths: Sequence[int]) -> States:
        """Return the states after each of these lengths as one batch."""
        states = {length: self._states_at(length) for length in set(lengths)}
        first = states[lengths[0]]
        return [
            [
                mx.concatenate([_present(states[length][layer][i]) for length in lengths])
                for i in range(len(first[layer]))
            ]
            for layer in range(len(first))
        ]

    def _states_at(self, length: int) -> States:
        """Return the states after `length` tokens; raises ValueError if they are no longer held."""
        if length not in self._points:
            one = next((p for p in self._passes if p.start < length <= p.start + p.count), None)
            if one is None:
                raise ValueError(f"the state after {length} tokens is no longer held")
            temporary: list[Any] = [ArraysCache(len(arrays)) for arrays in one.end]
            for cache, arrays in zip(temporary, one.end, strict=True):
                cache.cache = [*arrays]
            self._plan.rewind(temporary, one.recording, length - one.start)
            self._points[length] = [list(cache.cache) for cache in temporary]
        return self._points[length]

    # --------------------------------------------------------- rewind and commit

    def trim(self, length: int) -> None:
        """Drop all tokens from `length` on; the tree stays until the next chain."""
        self._settle()
        self._store.trim(length)
        self._points = {at: states for at, states in self._points.items() if at <= length}
        self._passes = [one for one in self._passes if one.start < length]
        for one in self._passes:
            one.count = min(one.count, length - one.start)
        self._forget_old()

    def _forget_old(self) -> None:
        """Drop all states but the first, the last and those that the last passes may need."""
        last = max(self._points)
        oldest = min([last, *(one.start for one in self._passes)])
        self._points = {at: s for at, s in self._points.items() if at >= oldest or at == 0}

    def commit(self, length: int) -> None:
        """End the pass with `length` tokens accepted."""
        self.trim(length)

    @property
    def takes_trees(self) -> bool:
        """False: a pass over the trunk takes a chain."""
        return False

    def append_tree(self, tree: TokenTree) -> None:
        """Raise ValueError: a recurrence cannot branch within a row."""
        raise ValueError(f"a recurrent state takes no tree of {len(tree)} tokens")

    def commit_rows(self, rows: Sequence[int]) -> None:
        """Refuse trees, as `append_tree` does."""
        raise ValueError(f"a recurrent state has no rows {list(rows)} of a tree")

    def suspend(self) -> Any:
        """Raise ValueError: a drafter does not run ahead of its tokens."""
        raise ValueError("a drafter's pass cannot be suspended")

    def resume(self, suspended: Any) -> None:
        """Refuse, as `suspend` does."""
        raise ValueError(f"a drafter's pass cannot be resumed: {suspended!r}")

    def move(self, slots: Sequence[int]) -> None:
        """Append the tokens in these scratch slots, one per depth, to the trunk."""
        self._settle()
        for number, slot in enumerate(slots):
            depth = next(d for d in reversed(self._tree) if d.start <= slot)
            branch = slice(slot - depth.start, slot - depth.start + 1)
            self._points[self.length + number + 1] = [
                [_present(array)[branch] for array in arrays] for arrays in depth.states
            ]
        self._store.move(slots)

    def write(self, start: int, rows: Sequence[tuple[mx.array, mx.array]]) -> None:
        """Raise ValueError: keys and values alone do not restore a recurrent state."""
        raise ValueError(f"{len(rows)} layers of rows from {start} on have no recurrent state")

    # --------------------------------------------------------- forks and memory

    def resumable(self, length: int) -> int:
        """Return how many of the first `length` tokens a fork can keep."""
        self._settle()
        inside = [min(length, one.start + one.count) for one in self._passes if one.start < length]
        points = [at for at in self._points if at <= min(length, self.length)]
        return min(self.length, max([0, *inside, *points]))

    def fork(self, length: int) -> "BranchingState":
        """Return an independent state with the first `length` tokens."""
        self._settle()
        new = BranchingState(self._make_caches, self._plan, bucketed=self._bucketed)
        states = self._states_at(length)
        new._store.share(self._store, length)
        new._points[length] = states
        return new

    def checkpoint(self, *, ends_turn: bool = False) -> None:
        """Do nothing: the states of the last passes are held."""

    @property
    def nbytes(self) -> int:
        """Memory of all buffers in bytes, used or not."""
        held = [self._now(), *self._points.values()]
        arrays = {id(a): a for states in held for layer in states for a in layer if a is not None}
        return self._store.nbytes + sum(array.nbytes for array in arrays.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that another token adds once buffers have grown."""
        return self._store.bytes_per_token

    @property
    def pass_size(self) -> PassSize:
        """Memory of one pass; the branches of a depth are gathered and get new states."""
        own = [sum(array.nbytes for array in layer if array is not None) for layer in self._now()]
        size = size_pass(own, self._plan)
        return size._replace(states=2 * size.states, most_kept=_MOST_RECORDED)

    def evaluate(self) -> None:
        """Evaluate everything that has been stored."""
        self._settle()
        mx.eval(self._store.arrays, self._now())

    def dump(self, length: int) -> dict[str, mx.array]:
        """Raise ValueError: a drafter's states are not saved."""
        raise ValueError(f"a drafter's state of {length} tokens is not saved")

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Refuse, as `dump` does."""
        raise ValueError(f"a drafter's state is not read from {len(arrays)} arrays")

    def take(self, buffers: Sequence[tuple[mx.array, mx.array]], length: int) -> None:
        """Refuse, as `dump` does."""
        raise ValueError(f"{len(buffers)} layers of {length} tokens have no recurrent state")


def _present(array: mx.array | None) -> mx.array:
    if array is None:
        raise ValueError("a recurrent layer has no state yet")
    return array
