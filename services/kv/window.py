"""Keys and values of a sliding-window layer: the window's, in the order of their positions.

A buffer has room for the window and some slack. New rows go behind the old ones, so that the
last ones can be taken back; when the slack is used up, the rows that no later token sees are
dropped, between two passes. mlx-lm's ring overwrites what a rejected draft would need again.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from services.kv.cache import round_to_bucket

_SLACK = 64
"""Rows behind the window before the buffer is compacted."""
_MARGIN = 16
"""Rows before the window that compaction leaves: forks can begin that much earlier."""


class WindowSnapshot(NamedTuple):
    """A window layer at one moment."""

    keys: mx.array | None
    values: mx.array | None
    offset: int
    start: int


class WindowCache:
    """One layer's window; what mlx-lm takes for a KV cache.

    Args:
        window: tokens that a token sees, itself included.
        keep: how many of them are the first ones of the sequence, which are never dropped.
        bucketed: give attention to several tokens a padded number of keys (`KVStore`).
    """

    def __init__(self, window: int, keep: int, *, bucketed: bool) -> None:
        self.window = window
        self.keep = keep
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        """Position of the next token; mlx-lm passes it to RoPE."""
        self._start = keep
        """Position of the token in row `keep`; the rows before hold the first tokens."""
        self._bucketed = bucketed

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the next `n` tokens over the rows that `update_and_fetch` will return."""
        window = min(window_size or self.window, self.window)
        if n == 1 and window == self.window:
            return None
        keys = self._positions(n)
        padding = self._pad(n) - len(keys)
        if self.offset + n <= window and not padding and not return_array:
            return "causal"
        distances = np.arange(self.offset, self.offset + n)[:, None] - keys[None]
        near = (keys[None] < self.keep) | (distances < window - self.keep)
        padded: Any = np.pad((distances >= 0) & near, ((0, 0), (0, padding)))
        return mx.array(padded)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store [1, heads, n, size]; return the rows that one of these tokens may see."""
        count = keys.shape[2]
        row, first = self._row(self.offset), self._row(self._first())
        # The kept rows lie right before the window's, or are fetched apart.
        apart = self.keep > 0 and first > self.keep
        begin = first if apart else first - self.keep
        end = begin + self._pad(count) - (self.keep if apart else 0)
        self.keys = _write(self.keys, keys, row, end)
        self.values = _write(self.values, values, row, end)
        self.offset += count
        if not apart:
            return self.keys[..., begin:end, :], self.values[..., begin:end, :]
        return self._with_kept(self.keys, begin, end), self._with_kept(self.values, begin, end)

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """All rows up to the last token's; for layers that read another's."""
        if self.keys is None or self.values is None:
            return None, None
        end = self._row(self.offset)
        return self.keys[..., :end, :], self.values[..., :end, :]

    def can_cut(self, length: int) -> bool:
        """Whether the first `length` tokens can go on from here."""
        first = max(self.keep, length - (self.window - self.keep) + 1)
        return length == self.offset or (length <= self.offset and self._start <= first)

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.offset = length

    def compact(self) -> None:
        """Drop rows that no later token sees, if there are many; only between two passes."""
        first = max(self.keep, self.offset - (self.window - self.keep) + 1 - _MARGIN)
        if self.keys is None or self.values is None or first - self._start < _SLACK:
            return
        begin, end = self._row(first), self._row(self.offset)
        self.keys = _copy(self._with_kept(self.keys, begin, end))
        self.values = _copy(self._with_kept(self.values, begin, end))
        self._start = first

    def capture(self) -> WindowSnapshot:
        """This moment; later writes copy the buffers once."""
        keys = None if self.keys is None else self.keys[...]
        values = None if self.values is None else self.values[...]
        return WindowSnapshot(keys, values, self.offset, self._start)

    def restore(self, snapshot: WindowSnapshot) -> None:
        """Be as at that moment."""
        self.keys = None if snapshot.keys is None else snapshot.keys[...]
        self.values = None if snapshot.values is None else snapshot.values[...]
        self.offset, self._start = snapshot.offset, snapshot.start

    def take(self, keys: mx.array, values: mx.array, length: int) -> None:
        """Begin with [1, heads, slots, size], of which the first `length` are tokens."""
        self.keys, self.values, self.offset, self._start = keys, values, length, self.keep
        self.compact()

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for evaluation."""
        return [array for array in (self.keys, self.values) if array is not None]

    def _first(self) -> int:
        """Position of the earliest token but the kept ones that the next token sees."""
        return max(self._start, self.offset - (self.window - self.keep) + 1)

    def _row(self, position: int) -> int:
        return position if position < self.keep else self.keep + position - self._start

    def _positions(self, count: int) -> npt.NDArray[np.int64]:
        """Of the rows that a pass over `count` tokens gets."""
        end = self.offset + count
        return np.concatenate([np.arange(min(self.keep, end)), np.arange(self._first(), end)])

    def _pad(self, count: int) -> int:
        """How many rows a pass over `count` tokens gets, padding included."""
        exact = len(self._positions(count))
        return round_to_bucket(exact) if self._bucketed and count > 1 else exact

    def _with_kept(self, buffer: mx.array, first: int, end: int) -> mx.array:
        """The kept rows and those in [first, end)."""
        rows = buffer[..., first:end, :]
        return mx.concatenate([buffer[..., : self.keep, :], rows], axis=2) if self.keep else rows


def _write(buffer: mx.array | None, rows: mx.array, row: int, end: int) -> mx.array:
    """`buffer` with `rows` at this row and room up to row `end`."""
    end = max(end, row + rows.shape[2])
    capacity = 0 if buffer is None else buffer.shape[2]
    if buffer is None or end > capacity:
        _, heads, _, size = rows.shape
        grown = mx.zeros((1, heads, round_to_bucket(end), size), rows.dtype)
        if buffer is not None:
            grown[..., :capacity, :] = buffer
        buffer = grown
    buffer[..., row : row + rows.shape[2], :] = rows
    return buffer


def _copy(rows: mx.array) -> mx.array:
    return _write(None, rows, 0, rows.shape[2])
