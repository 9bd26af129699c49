"""Keys and values of a sliding-window layer: the window's rows in order of position.

A buffer has room for the window and some slack. New rows are appended, so that the last ones can be
dropped; when the slack is used up, rows that no later token attends to are dropped between two
passes. mlx-lm's ring would overwrite rows that a rejected draft needs again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from services.engine.batch import Span, round_to_bucket

_SLACK = 64
"""Rows after the window before the buffer is compacted."""
_MARGIN = 16
"""Rows before the window that compaction leaves: forks can start that much earlier."""


_CHUNK = 256
"""Largest number of prompt rows per pass: chunks end at checkpoints."""


class WindowSnapshot(NamedTuple):
    """A window layer at one point."""

    keys: mx.array | None
    values: mx.array | None
    length: int
    start: int


class WindowCache:
    """One layer's window, in the form of an mlx-lm KV cache.

    Args:
        window: tokens that a token attends to, itself included.
        keep: how many of the sequence's first tokens are never dropped (attention sinks).
        bucketed: pad the number of keys that attention to several tokens gets (`KVStore`).
    """

    def __init__(self, window: int, keep: int, *, bucketed: bool) -> None:
        self.window = window
        self.keep = keep
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.length = 0
        """Position of the next token."""
        self._tree: Span | None = None
        """The current pass, if it is over a tree."""
        self._start = keep
        """Position of the token in row `keep`; the rows before it hold the first tokens."""
        self._bucketed = bucketed
        self._fetched = (0, 0, False)
        """The rows of the latest pass, and whether the kept ones are fetched separately."""

    @property
    def offset(self) -> int | mx.array:
        """Position, or array of positions, that mlx-lm passes to RoPE."""
        return self.length if self._tree is None else self._tree.offset

    def begin_tree(self, span: Span) -> None:
        """Begin a pass over a tree, which ends when it is cut or its rows are kept."""
        self._tree = span

    def keep_rows(self, rows: Sequence[int]) -> None:
        """End the pass over the tree, keeping these rows: a path from its first one."""
        if self._tree is None or self.keys is None or self.values is None:
            raise ValueError("no pass over a tree is in progress")
        start = self._row(self._tree.start)
        if list(rows) != list(range(len(rows))):
            indices = mx.array([start + row for row in rows], dtype=mx.int32)
            for buffer in (self.keys, self.values):
                buffer[..., start : start + len(rows), :] = mx.take(buffer, indices, axis=2)
        self.cut(self._tree.start + len(rows))

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of the next `n` tokens over the rows that `update_and_fetch` returns."""
        window = min(window_size or self.window, self.window)
        if n == 1 and window == self.window:
            return None
        slots = self._positions(n)
        padding = self._pad(n) - len(slots)
        tree = self._tree
        if tree is None and self.length + n <= window and not padding and not return_array:
            return "causal"
        keys = slots if tree is None else tree.positions[slots]
        distances = keys[-n:, None] - keys[None]
        before = distances >= 0
        if tree is not None and tree.visible is not None:
            before = tree.visible[:, slots]
        near = (keys[None] < self.keep) | (distances < window - self.keep)
        padded: Any = np.pad(before & near, ((0, 0), (0, padding)))
        return mx.array(padded)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store [1, heads, n, size]; return the rows that any of these tokens may attend to."""
        count = keys.shape[2]
        row, first = self._row(self.length), self._row(self._first())
        # The kept rows are right before the window's, or fetched separately.
        apart = self.keep > 0 and first > self.keep
        begin = first if apart else first - self.keep
        end = begin + self._pad(count) - (self.keep if apart else 0)
        self.keys = _write(self.keys, keys, row, end)
        self.values = _write(self.values, values, row, end)
        self.length += count
        self._fetched = (begin, end, apart)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the result of the last `update_and_fetch`, for layers that share another's KV."""
        begin, end, apart = self._fetched
        if self.keys is None or self.values is None:
            raise ValueError("an empty cache has no rows")
        if not apart:
            return self.keys[..., begin:end, :], self.values[..., begin:end, :]
        return self._with_kept(self.keys, begin, end), self._with_kept(self.values, begin, end)

    def can_cut(self, length: int) -> bool:
        """Return True if the first `length` tokens can be continued."""
        first = max(self.keep, length - (self.window - self.keep) + 1)
        return length == self.length or (length <= self.length and self._start <= first)

    def cut(self, length: int) -> None:
        """Drop the tokens from `length` on."""
        self.length, self._tree = length, None

    def compact(self) -> None:
        """Drop rows that no later token attends to, if there are many; only between two passes."""
        first = max(self.keep, self.length - (self.window - self.keep) + 1 - _MARGIN)
        if self.keys is None or self.values is None or first - self._start < _SLACK:
            return
        begin, end = self._row(first), self._row(self.length)
        self.keys = _copy(self._with_kept(self.keys, begin, end))
        self.values = _copy(self._with_kept(self.values, begin, end))
        self._start = first

    def capture(self) -> WindowSnapshot:
        """Capture this point; later writes copy the buffers once."""
        keys = None if self.keys is None else self.keys[...]
        values = None if self.values is None else self.values[...]
        return WindowSnapshot(keys, values, self.length, self._start)

    def restore(self, snapshot: WindowSnapshot) -> None:
        """Return to the captured point."""
        held = 0 if snapshot.keys is None else snapshot.keys.shape[2]
        if self.keep + snapshot.length - snapshot.start > held and snapshot.length > self.keep:
            raise ValueError(f"{held} rows are not a window at {snapshot.length} tokens")
        self.keys = None if snapshot.keys is None else snapshot.keys[...]
        self.values = None if snapshot.values is None else snapshot.values[...]
        self.length, self._start = snapshot.length, snapshot.start

    def take(self, keys: mx.array, values: mx.array, length: int) -> None:
        """Start with [1, heads, slots, size], of which the first `length` are tokens."""
        self.keys, self.values, self.length, self._start = keys, values, length, self.keep
        self.compact()

    @property
    def growth(self) -> int:
        """The bytes by which the buffers still grow during a long prompt."""
        rows = round_to_bucket(self.window + _SLACK + _MARGIN + _CHUNK)
        return sum(
            max(0, rows - array.shape[2]) * (array.nbytes // array.shape[2]) for array in self.state
        )

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for evaluation."""
        return [array for array in (self.keys, self.values) if array is not None]

    def _first(self) -> int:
        """Position of the first token, kept ones aside, that the next token attends to."""
        return max(self._start, self.length - (self.window - self.keep) + 1)

    def _row(self, position: int) -> int:
        return position if position < self.keep else self.keep + position - self._start

    def _positions(self, count: int) -> npt.NDArray[np.int64]:
        """Return the positions of the rows that a pass over `count` tokens gets."""
        end = self.length + count
        return np.concatenate([np.arange(min(self.keep, end)), np.arange(self._first(), end)])

    def _pad(self, count: int) -> int:
        """Return how many rows a pass over `count` tokens gets, padding included."""
        exact = len(self._positions(count))
        return round_to_bucket(exact) if self._bucketed and count > 1 else exact

    def _with_kept(self, buffer: mx.array, first: int, end: int) -> mx.array:
        """Return the kept rows and those in [first, end)."""
        rows = buffer[..., first:end, :]
        return mx.concatenate([buffer[..., : self.keep, :], rows], axis=2) if self.keep else rows


def _write(buffer: mx.array | None, rows: mx.array, row: int, end: int) -> mx.array:
    """Return `buffer` with `rows` at this row and room up to row `end`."""
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
