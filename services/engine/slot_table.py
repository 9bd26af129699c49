"""Keys and values of sequences in shared passes in one buffer per layer: one attention for all.

Computed sequence by sequence, a shared pass costs the host as many launches as it has sequences.
Here each sequence has a seat, a run of slots of a common buffer; a pass writes all its rows at
once, and one kernel attends each to the slots of its own seat. A sequence is copied to its seat
when it first shares a pass, unless its prompt is computed there, and back when anything else uses
its slots; others are not touched, unless the table has to grow, which doubles it.

Passes are padded to one of a few sizes, which are computed at load (`round_rows`).
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from protocol.errors import ModelError
from services.engine.batch import BatchArrays, round_to_bucket
from services.engine.trace import FeatureReader, Trace
from services.kernels.cuda import kv_rows
from services.kernels.cuda.attention import ROWS_STEP, round_rows
from services.kernels.cuda.kv_rows import Attend, TracedLayer
from services.kv.cache import KVStore
from services.kv.pool import Pair
from services.mlx.free_memory import free_for_mlx
from services.mlx.launching import launch
from services.mlx.selftest import check
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)

_FEWEST_SEATS, _MOST_SEATS = 4, 32
"""Seats of a new table: as many as `_KEPT_BYTES` allow, within these bounds."""
_KEPT_BYTES = 1 << 29
"""A table of at most this size is kept when empty, so that it need not grow again."""
_SPARE_SLOTS = 256
"""Room for new tokens, so that the table seldom grows."""
_FILLER = ROWS_STEP
"""Slots before the seats, for the rows that pad a pass."""
_WARM_PASSES = (2, 4, 8, 16, 32, 64)
_WARM_PROMPTS = (128, 256, 384, 512)
_WARM_TIMES = 2
"""The first pass also copies, and its graphs are split differently."""
_TRIAL_ROWS, _TRIAL_TOKENS = 16, 64
"""Rows of the pass that is compared with its trace, and its number of different tokens."""
_MOST_PROMPT_BYTES = 1 << 28
"""Keys and values that the prompts of a pass may read in one layer, counted for each token that
reads them: every row reads them separately, unlike in MLX's own attention.
"""


class _Kind(NamedTuple):
    """Keys or values of one layer: shape and type per token."""

    heads: int
    size: int
    dtype: mx.Dtype


@dataclass
class _Layer:
    """One layer's keys and values of all seats."""

    keys: mx.array
    """[1, heads, filler slots and seats * slots, size]"""
    values: mx.array


class Seat:
    """One sequence's place in a table."""

    def __init__(self, table: "SlotTable", index: int) -> None:
        self._table = table
        self.index = index

    arrays: Sequence[mx.array] = ()

    def leave(self, length: int) -> list[Pair]:
        """Give the seat up; return [1, heads, slots, size] of at least the first `length` slots."""
        return self._table.copy_out(self.index, length)

    def move(self, slots: Sequence[int], to: int) -> None:
        """Copy the rows in `slots` to the consecutive slots from `to` on."""
        self._table.move(self.index, mx.array(list(slots), dtype=mx.int32), to)

    @property
    def milestones(self) -> list[mx.array]:
        """One array per layer that is computed once the pass has stored its rows."""
        return self._table.milestones

    def evaluate(self) -> None:
        """Evaluate what has been stored."""
        self._table.evaluate()


class SlotTable:
    """One buffer of keys and values per layer for all sequences that share passes.

    Args:
        attend: the attention of a pass.
    """

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._layers: list[_Layer] = []
        self._kinds: list[tuple[_Kind, _Kind]] = []
        """Kinds of the layers, once one was used."""
        self._taken: list[weakref.ref[KVStore] | None] = []
        self._slots = 0
        """Slots per seat."""
        self._traced: Trace | None = None
        self._written: list[mx.array] = []
        """Per layer, an array that is computed once the last pass has written its rows in place."""

    def run(self, model: Any, row: mx.array, stores: Sequence[KVStore]) -> mx.array | None:
        """Return lazy [1, rows, head] logits of these sequences' passes, concatenated.

        Returns None if nothing is stored yet that reveals the table's shape.
        """
        is_own = self._traced is not None and self._traced.model is model
        few = row.shape[1] <= _WARM_PASSES[-1]
        return self._run(model, row, stores, self._traced if is_own and few else None)

    def _run(
        self, model: Any, row: mx.array, stores: Sequence[KVStore], traced: Trace | None
    ) -> mx.array | None:
        count = row.shape[1]
        more = round_rows(count) - count
        self._finish_pass()
        self._written = []
        batch = self._pack(row, stores, more)
        if batch is None:
            return None
        if traced is not None:
            replayed = traced(batch, self._layers)
            logits, self._written = replayed.logits, replayed.written
            if traced.reader is not None and replayed.features is not None:
                traced.reader.put(replayed.features)
        else:
            logits = self._call(model, batch)
        return logits[:, :count] if more else logits

    def _call(self, model: Any, batch: BatchArrays) -> mx.array:
        """Compute a pass by the model itself."""
        caches = [
            TracedLayer(one.keys, one.values, batch, attend=self._attend) for one in self._layers
        ]
        logits: mx.array = model(batch.tokens, cache=caches)
        self._layers = [_Layer(cache.keys, cache.values) for cache in caches]
        return logits

    def _finish_pass(self) -> None:
        """Make sure that the rows of the last pass are written, even if its result was not used."""
        if self._written:
            launch(self._written[-1])

    def give_up_pass(self) -> None:
        """Drop the rows of the last pass, which failed."""
        self._written = []

    def warm_up(self, model: Any, make_store: Callable[[], Any]) -> Steps[None]:
        """Compute passes of each small size and some of prompts, before any request shares one.

        Those of the small sizes are traced from then on, if that is faster here.
        """
        try_pass = partial(self._try_pass, model, make_store)
        trial = partial(try_pass, _TRIAL_ROWS)
        traced = Trace(model, attend=self._attend)
        ways = partial(trial, None), partial(trial, traced)
        verdict = yield from check("traced shared passes", "trace", *ways, [(), ()])
        self._traced = traced if verdict.faster else None
        try:
            for rows in _WARM_PASSES * _WARM_TIMES:
                mx.eval(try_pass(rows, self._traced))
                yield
            for rows in _WARM_PROMPTS * _WARM_TIMES:
                try_pass(rows, None)
                self.evaluate()
                yield
        except ModelError as error:
            _log.info("passes of several sequences are not computed beforehand: %s", error)

    def _try_pass(
        self, model: Any, make_store: Callable[[], Any], rows: int, traced: Trace | None
    ) -> mx.array:
        """Run a pass over two new sequences, one of which has all tokens but one."""
        stores = [make_store(), make_store()]
        stores[0].append(rows - 1)
        stores[1].append(1)
        logits = self._run(model, mx.arange(rows)[None] % _TRIAL_TOKENS, stores, traced)
        if logits is None:
            raise ModelError("there is no room for a table")
        return logits

    def read(self, reader: FeatureReader) -> None:
        """Include the states that a drafter reads in traces."""
        if self._traced is not None:
            self._traced.read(reader)

    def suits_prompts(self, stores: Sequence[KVStore]) -> bool:
        """Return True if these passes read so little that each row may read it separately."""
        spans = [store.span for store in stores]
        pairs = sum(span.count * (span.start + (span.count + 1) // 2) for span in spans)
        widest = max((_bytes_of(*kinds) for kinds in self._kinds), default=0)
        return 0 < pairs * widest <= _MOST_PROMPT_BYTES

    def _pack(self, row: mx.array, stores: Sequence[KVStore], more: int) -> BatchArrays | None:
        ends = [store.span.end for store in stores]
        for store in stores:
            if not isinstance(store.memory, Seat):
                store.gather()
        if not self._make_room(stores, max(ends)):
            return None
        for store in stores:
            if store.memory is None:
                self._take_in(store)
        return self._plan(mx.pad(row, [(0, 0), (0, more)]) if more else row, stores, max(ends))

    @property
    def milestones(self) -> list[mx.array]:
        """One array per layer that is computed once the pass has stored its rows."""
        return self._written or [layer.keys for layer in self._layers]

    def evaluate(self) -> None:
        """Evaluate what all seats have stored."""
        mx.eval([[one.keys, one.values] for one in self._layers])
        if self._written:
            mx.eval(self._written)

    def is_shared_by(self, store: KVStore) -> bool:
        """Return True if this and another sequence have seats: they are about to share passes."""
        return isinstance(store.memory, Seat) and self._count_taken() > 1

    def drop_if_empty(self) -> None:
        """Free an empty table's memory, if it is large."""
        is_large = self._bytes(len(self._taken), self._slots) > _KEPT_BYTES
        if is_large and not self._count_taken():
            self._layers, self._taken, self._slots = [], [], 0

    def _bytes(self, seats: int, slots: int) -> int:
        """Return the bytes of a table with that many seats and slots."""
        return seats * slots * sum(_bytes_of(*kinds) for kinds in self._kinds)

    def _count_taken(self) -> int:
        return sum(map(self._sits, range(len(self._taken))))

    def _sits(self, index: int) -> bool:
        """Return True if this seat is taken by a sequence that still exists."""
        taken = self._taken[index]
        store = taken() if taken is not None else None
        return store is not None and store.memory is not None

    def _make_room(self, stores: Sequence[KVStore], longest: int) -> bool:
        """Give every sequence a seat of `longest` slots.

        Returns False if no shape is known, or there is not enough memory.
        """
        if not self._learn_kinds(stores):
            return False
        if not self._layers and not self._begin(round_to_bucket(longest + _SPARE_SLOTS)):
            return False
        free = len(self._taken) - self._count_taken()
        coming = sum(store.memory is None for store in stores)
        seats, slots = len(self._taken), self._slots
        while free + seats - len(self._taken) < coming:
            seats *= 2
        if longest > slots:
            slots = round_to_bucket(max(longest + _SPARE_SLOTS, 2 * slots))
        if (seats, slots) == (len(self._taken), self._slots):
            return True
        if self._bytes(seats, slots) > free_for_mlx().bytes:
            return False
        self._grow(seats, slots)
        return True

    def _learn_kinds(self, stores: Sequence[KVStore]) -> bool:
        """Return True if the layers' kinds are known, perhaps from one of these sequences."""
        known = next((store for store in stores if store.arrays), None)
        if not self._kinds and known is not None:
            self._kinds = [(_kind_of(keys), _kind_of(values)) for keys, values in known.buffers]
        return bool(self._kinds)

    def _begin(self, slots: int) -> bool:
        """Create as many seats of `slots` slots as an empty table may keep, if they fit."""
        free, seats = free_for_mlx().bytes, _MOST_SEATS
        while seats > _FEWEST_SEATS and self._bytes(seats, slots) > min(_KEPT_BYTES, free):
            seats //= 2
        if self._bytes(seats, slots) > free:
            return False

        def empty(kind: _Kind) -> mx.array:
            return mx.zeros((1, kind.heads, _FILLER + seats * slots, kind.size), kind.dtype)

        self._taken = [None for _ in range(seats)]
        self._slots = slots
        self._layers = [_Layer(empty(keys), empty(values)) for keys, values in self._kinds]
        return True

    def _grow(self, seats: int, slots: int) -> None:
        before = len(self._taken)
        wider = [(0, 0), (0, seats - before), (0, slots - self._slots), (0, 0)]

        def widen(buffer: mx.array) -> mx.array:
            _, heads, _, size = buffer.shape
            seated = buffer[0, :, _FILLER:].reshape(heads, before, self._slots, size)
            padded = mx.pad(seated, wider).reshape(1, heads, seats * slots, size)
            return mx.concatenate([buffer[..., :_FILLER, :], padded], axis=2)

        self._layers = [_Layer(widen(one.keys), widen(one.values)) for one in self._layers]
        self.evaluate()
        self._taken += [None] * (seats - before)
        self._slots = slots

    def _base(self, index: int) -> int:
        """Return the first slot of a seat."""
        return _FILLER + index * self._slots

    def _take_in(self, store: KVStore) -> None:
        index = next(i for i in range(len(self._taken)) if not self._sits(i))
        base, count = self._base(index), store.span.start
        for layer, (keys, values) in zip(self._layers, store.vacate(), strict=count > 0):
            if count:
                layer.keys[..., base : base + count, :] = keys[..., :count, :]
                layer.values[..., base : base + count, :] = values[..., :count, :]
        store.memory = Seat(self, index)
        self._taken[index] = weakref.ref(store)

    def _plan(self, tokens: mx.array, stores: Sequence[KVStore], longest: int) -> BatchArrays:
        """Place the rows of these sequences and unused ones; each attends to some slot."""
        bases = [self._base(_seat_of(store).index) for store in stores]
        counts = [store.span.count for store in stores]
        rows, more = sum(counts), tokens.size - sum(counts)
        mask: Any = np.zeros((rows + more, min(round_to_bucket(longest), self._slots)), np.bool_)
        mask[rows:, 0] = True
        slots, row = [], 0
        for store, base in zip(stores, bases, strict=True):
            span = store.span
            mask[row : row + span.count, : span.end] = span.find_visible()
            slots.append(base + np.arange(span.start, span.end))
            row += span.count
        filler = np.zeros(more, np.int64)
        positions = np.concatenate([*(store.span.own_positions for store in stores), filler])
        return BatchArrays(
            tokens,
            mx.array(np.concatenate([*slots, np.arange(more)]), mx.int32),
            mx.array(positions, dtype=mx.int32),
            mx.array(mask),
            mx.array(np.concatenate([np.repeat(bases, counts), filler]), dtype=mx.int32),
        )

    def copy_out(self, index: int, length: int) -> list[Pair]:
        """Return a seat's keys and values, and free the seat."""
        self._finish_pass()
        base = self._base(index)
        rows = slice(base, base + min(round_to_bucket(length), self._slots))
        copies: list[Pair] = [
            (mx.contiguous(one.keys[..., rows, :]), mx.contiguous(one.values[..., rows, :]))
            for one in self._layers
        ]
        # While they are views, the table cannot be written in place.
        mx.eval(copies)
        self._taken[index] = None
        return copies

    def move(self, index: int, slots: mx.array, to: int) -> None:
        """Copy the rows in `slots` to the consecutive slots from `to` on."""
        base = self._base(index)
        if self._written:  # written in place, and so moved in place
            launch(
                [
                    kv_rows.move(one.keys, one.values, base + slots, base + to)
                    for one in self._layers
                ]
            )
            return
        for layer in self._layers:
            for buffer in (layer.keys, layer.values):
                end = base + to + slots.size
                buffer[..., base + to : end, :] = mx.take(buffer, base + slots, axis=2)


def _kind_of(rows: mx.array) -> _Kind:
    return _Kind(rows.shape[1], rows.shape[3], rows.dtype)


def _bytes_of(*kinds: _Kind) -> int:
    """Return the bytes of one token's keys and values in a layer."""
    return sum(kind.heads * kind.size * kind.dtype.size for kind in kinds)


def _seat_of(store: KVStore) -> Seat:
    if not isinstance(store.memory, Seat):
        raise TypeError("a sequence without a seat cannot be part of a pass over the table")
    return store.memory
