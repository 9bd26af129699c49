"""Keys and values of the sequences of shared passes in one buffer a layer: one attention for all.

Sequence by sequence, a shared pass costs the host as many launches as there are sequences in
it. Here each sequence has a seat, a run of slots of a common buffer; a pass writes all its
rows at once, and one kernel attends them, each to the slots of its own seat. Who comes is
copied to its seat when it first shares a pass, and back when something else is done with its
slots; others are not touched, unless the table has to grow, which doubles it.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from services.kv.cache import KVStore
from services.kv.slots import round_to_bucket

_FEWEST_SEATS = 4
_SPARE_SLOTS = 256
"""Room for tokens to come, so that the table seldom grows."""

Attend = Callable[..., mx.array]
"""(queries [1, heads, rows, size], keys [kv heads, all slots, size], values, mask [rows, slots],
first [rows], scale) -> [1, heads, rows, size]; row i sees the slots from first[i] on."""


@dataclass
class _Layer:
    keys: mx.array
    """[heads, seats * slots, size]"""
    values: mx.array


@dataclass(frozen=True)
class _Pass:
    """Which rows a shared pass writes, and what each of its tokens sees."""

    offset: mx.array
    """[rows] RoPE positions."""
    slots: mx.array
    """[rows] where its keys and values go."""
    first: mx.array
    """[rows] the first slot of its seat."""
    mask: mx.array
    """bool [rows, longest]"""


@dataclass(frozen=True)
class TableKV:
    """Keys or values of all seats, in the place of one sequence's."""

    buffer: mx.array
    mask: mx.array
    first: mx.array
    attend: Attend


class TableCache:
    """One layer of the table for one pass; what mlx-lm takes for a KV cache."""

    def __init__(self, layer: _Layer, now: _Pass, attend: Attend) -> None:
        self._layer, self._pass, self._attend = layer, now, attend

    @property
    def offset(self) -> mx.array:
        """[tokens] RoPE position of each token of the row."""
        return self._pass.offset

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """bool [n, slots], which slots of its own seat each token sees."""
        del return_array
        if window_size is not None or n != self._pass.mask.shape[0]:
            raise TypeError("a table has no windows, and takes the tokens of one pass")
        return self._pass.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[TableKV, TableKV]:
        """Store [1, heads, n, size], each row in its slot; return all of them."""
        layer, now = self._layer, self._pass
        layer.keys[:, now.slots, :] = keys[0]
        layer.values[:, now.slots, :] = values[0]
        return (
            TableKV(layer.keys, now.mask, now.first, self._attend),
            TableKV(layer.values, now.mask, now.first, self._attend),
        )


def attend_gathered(  # noqa: PLR0917  # `Attend`
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    first: mx.array,
    scale: float,
) -> mx.array:
    """`Attend` with MLX's own operations; it copies what is seen, and is for comparison."""
    slots = first[:, None] + mx.arange(mask.shape[1])[None]
    seen = [mx.take(buffer, slots, axis=1).swapaxes(0, 1) for buffer in (keys, values)]
    rows = queries[0].swapaxes(0, 1)[:, :, None]
    found: mx.array = mx.fast.scaled_dot_product_attention(
        rows, seen[0], seen[1], scale=scale, mask=mask[:, None, None]
    )
    return found[:, :, 0].swapaxes(0, 1)[None]


class Seat:
    """One sequence's place in a table."""

    def __init__(self, table: "SlotTable", index: int) -> None:
        self._table = table
        self.index = index

    def leave(self, length: int) -> list[tuple[mx.array, mx.array]]:
        """Give the seat up; [1, heads, slots, size] of at least the first `length` slots."""
        return self._table.copy_out(self.index, length)

    def move(self, slots: mx.array, to: int) -> None:
        """Copy the rows in `slots` to the consecutive slots from `to` on."""
        self._table.move(self.index, slots, to)


class SlotTable:
    """See the module.

    Args:
        attend: the attention of a pass.
    """

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._layers: list[_Layer] = []
        self._taken: list[weakref.ref[KVStore] | None] = []
        self._slots = 0
        """Of a seat."""

    def pack(self, stores: Sequence[KVStore]) -> list[TableCache] | None:
        """The caches for one forward over the passes of these, laid end to end.

        None if nothing is stored yet from which the table could learn its shape.
        """
        ends = [store.frame.start + store.frame.count for store in stores]
        if not self._make_room(stores, max(ends)):
            return None
        for store in stores:
            if store.seat is None:
                self._take_in(store)
        now = self._plan(stores, max(ends))
        return [TableCache(layer, now, self._attend) for layer in self._layers]

    def drop_if_empty(self) -> None:
        """Free the memory of a table in which nobody sits."""
        if self._layers and not any(map(self._sits, range(len(self._taken)))):
            self._layers, self._taken, self._slots = [], [], 0

    def _sits(self, index: int) -> bool:
        """Whether this seat is taken, by a sequence that is still there."""
        taken = self._taken[index]
        store = taken() if taken is not None else None
        return store is not None and store.seat is not None

    def _make_room(self, stores: Sequence[KVStore], longest: int) -> bool:
        """Let every sequence have a seat of so many slots; False if no shape is known."""
        if not self._layers:
            known = next((s for s in stores if s.caches[0].keys is not None), None)
            if known is None:
                return False
            self._slots = round_to_bucket(longest + _SPARE_SLOTS)
            self._taken = [None] * _FEWEST_SEATS
            self._layers = [
                _Layer(self._empty(cache.keys), self._empty(cache.values)) for cache in known.caches
            ]
        free = sum(not self._sits(index) for index in range(len(self._taken)))
        coming = sum(store.seat is None for store in stores)
        seats, slots = len(self._taken), self._slots
        while free + seats - len(self._taken) < coming:
            seats *= 2
        if longest > slots:
            slots = round_to_bucket(max(longest + _SPARE_SLOTS, 2 * slots))
        if (seats, slots) != (len(self._taken), self._slots):
            self._grow(seats, slots)
        return True

    def _empty(self, like: mx.array | None) -> mx.array:
        if like is None:
            raise ValueError("a layer without keys and values cannot be part of a table")
        return mx.zeros((like.shape[1], _FEWEST_SEATS * self._slots, like.shape[3]), like.dtype)

    def _grow(self, seats: int, slots: int) -> None:
        before = len(self._taken)
        wider = [(0, 0), (0, seats - before), (0, slots - self._slots), (0, 0)]

        def widen(buffer: mx.array) -> mx.array:
            heads, _, size = buffer.shape
            padded = mx.pad(buffer.reshape(heads, before, self._slots, size), wider)
            return padded.reshape(heads, seats * slots, size)

        self._layers = [_Layer(widen(one.keys), widen(one.values)) for one in self._layers]
        mx.eval([[one.keys, one.values] for one in self._layers])
        self._taken += [None] * (seats - before)
        self._slots = slots

    def _take_in(self, store: KVStore) -> None:
        index = next(i for i in range(len(self._taken)) if not self._sits(i))
        base, count = index * self._slots, store.frame.start
        for layer, cache in zip(self._layers, store.caches, strict=True):
            keys, values = cache.keys, cache.values
            if count and keys is not None and values is not None:
                layer.keys[:, base : base + count, :] = keys[0, :, :count]
                layer.values[:, base : base + count, :] = values[0, :, :count]
            cache.keys = cache.values = None
        store.seat = Seat(self, index)
        self._taken[index] = weakref.ref(store)

    def _plan(self, stores: Sequence[KVStore], longest: int) -> _Pass:
        bases = [self._slots * _seat_of(store).index for store in stores]
        counts = [store.frame.count for store in stores]
        mask: Any = np.zeros((sum(counts), min(round_to_bucket(longest), self._slots)), np.bool_)
        slots, row = [], 0
        for store, base in zip(stores, bases, strict=True):
            frame = store.frame
            end = frame.start + frame.count
            mask[row : row + frame.count, :end] = store.visible_rows()
            slots.append(base + np.arange(frame.start, end))
            row += frame.count
        positions = np.concatenate([store.positions for store in stores])
        return _Pass(
            # One array for all layers: they share the sines of a position by its identity.
            offset=mx.array(positions, dtype=mx.int32),
            slots=mx.array(np.concatenate(slots), dtype=mx.int32),
            first=mx.array(np.repeat(bases, counts), dtype=mx.int32),
            mask=mx.array(mask),
        )

    def copy_out(self, index: int, length: int) -> list[tuple[mx.array, mx.array]]:
        """A seat's keys and values, which is free from then on."""
        base = index * self._slots
        rows = slice(base, base + min(round_to_bucket(length), self._slots))
        copies: list[tuple[mx.array, mx.array]] = [
            (mx.contiguous(one.keys[None, :, rows]), mx.contiguous(one.values[None, :, rows]))
            for one in self._layers
        ]
        # As long as they are views, the table cannot be written in place.
        mx.eval(copies)
        self._taken[index] = None
        return copies

    def move(self, index: int, slots: mx.array, to: int) -> None:
        """See `Seat.move`."""
        base = index * self._slots
        for layer in self._layers:
            for buffer in (layer.keys, layer.values):
                buffer[:, base + to : base + to + slots.size, :] = mx.take(
                    buffer, base + slots, axis=1
                )


def _seat_of(store: KVStore) -> Any:
    if store.seat is None:
        raise ValueError("a sequence without a seat cannot be part of a pass over the table")
    return store.seat
