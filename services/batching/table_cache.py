"""The layers of a slot table (`slot_table`) as the caches of one pass over its rows."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from services.kernels.cuda.kv_rows import InPlace

Attend = Callable[..., mx.array]
"""Attention over a table.

(queries [1, heads, rows, size], keys [kv heads, all slots, size], values, mask [rows, slots], first
[rows], scale) -> [1, heads, rows, size]; row i attends to the slots from first[i] on.
"""


@dataclass
class TableLayer:
    """One layer's keys and values of all seats."""

    keys: mx.array
    """[heads, filler slots and seats * slots, size]"""
    values: mx.array


@dataclass(frozen=True)
class TablePass:
    """The slots that a shared pass writes, and those each of its tokens attends to."""

    offset: mx.array
    """[rows] RoPE positions."""
    slots: mx.array
    """[1, rows, 1] slot of its keys and values."""
    first: mx.array
    """[rows] the first slot of its seat."""
    mask: mx.array
    """bool [rows, longest]"""


@dataclass(frozen=True)
class TableKV:
    """Keys or values of all seats, in place of one sequence's."""

    buffer: mx.array
    mask: mx.array
    first: mx.array
    attend: Attend


class TableCache(InPlace):
    """One layer of the table for one pass, in the form of an mlx-lm KV cache."""

    def __init__(
        self, layer: TableLayer, now: TablePass, attend: Attend, *, owned: bool = False
    ) -> None:
        slots = now.slots.reshape(-1)
        super().__init__(layer.keys[None], layer.values[None], slots, owned=owned)
        self._layer, self._pass, self._attend = layer, now, attend

    @property
    def offset(self) -> mx.array:
        """[tokens] RoPE position of each token of the row."""
        return self._pass.offset

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Return bool [n, slots], the slots of its own seat each token attends to."""
        del return_array
        if window_size is not None or n != self._pass.mask.shape[0]:
            raise TypeError("a table has no windows, and takes the tokens of one pass")
        return self._pass.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[TableKV, TableKV]:
        """Store [1, heads, n, size], each row in its slot; return all of them."""
        layer, now = self._layer, self._pass
        if not self.write_rows(keys, values):
            layer.keys = _put(layer.keys, now.slots, keys)
            layer.values = _put(layer.values, now.slots, values)
        return self.fetch()

    def fetch(self) -> tuple[TableKV, TableKV]:
        """Return all slots."""
        layer, now = self._layer, self._pass
        return (
            TableKV(layer.keys, now.mask, now.first, self._attend),
            TableKV(layer.values, now.mask, now.first, self._attend),
        )


def _put(buffer: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
    """Return `buffer` with `rows` [1, heads, n, size] in these slots, in one launch.

    An assignment to `buffer[:, slots]` needs six: it makes indices of the heads and converts them.
    """
    return mx.put_along_axis(buffer, slots, rows.squeeze(0), axis=1)
