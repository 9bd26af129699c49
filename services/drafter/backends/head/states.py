"""The target's states that a head has received for a sequence's tokens."""

import numpy as np

from services.drafter.backends.base import Rows


class StateRun:
    """States of consecutive positions, the latest that arrived.

    Args:
        window: minimum number of the last states that are kept.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.first = 0
        self._rows: Rows | None = None
        self._buffer: Rows | None = None
        """The buffer behind `_rows`, with room for the next states."""

    @property
    def end(self) -> int:
        """The position after the last state."""
        return self.first + (0 if self._rows is None else len(self._rows))

    def add(self, first: int, rows: Rows) -> None:
        """Add states from position `first` on, replacing older ones. A gap starts a new run."""
        stop = first + len(rows)
        if self._rows is None or first > self.end or stop < self.first:
            self.first, self._rows, self._buffer = first, rows, None
            return
        if first == self.end:
            self._append(self._rows, rows)
        else:
            self._insert(self._rows, first, rows)
        if len(self._rows) > 2 * self._window:
            self.first = self.end - self._window
            self._rows, self._buffer = self._rows[-self._window :].copy(), None

    def _append(self, known: Rows, rows: Rows) -> None:
        count = len(known) + len(rows)
        if self._buffer is None or count > len(self._buffer):
            room = max(count, min(2 * count, 2 * self._window + len(rows)))
            self._buffer = np.empty((room, *known.shape[1:]), known.dtype)
            self._buffer[: len(known)] = known
        self._buffer[len(known) : count] = rows
        self._rows = self._buffer[:count]

    def _insert(self, known: Rows, first: int, rows: Rows) -> None:
        stop = first + len(rows)
        before = known[: max(0, first - self.first)]
        after = known[max(0, stop - self.first) :]
        self.first = min(first, self.first)
        self._rows, self._buffer = np.concatenate([before, rows, after]), None

    def covers(self, position: int) -> bool:
        """Return True if the state of this position is held."""
        return self.first <= position < self.end

    def trim(self, end: int) -> None:
        """Drop the states from position `end` on."""
        if self._rows is not None and end < self.end:
            self._rows = self._rows[: max(0, end - self.first)]
            self.first = min(self.first, end)

    def at(self, first: int, stop: int) -> Rows:
        """Return the states of positions [first, stop), all of which must be held."""
        if self._rows is None or not self.first <= first < stop <= self.end:
            raise IndexError(f"states {first} to {stop} of {self.first} to {self.end}")
        states: Rows = self._rows[first - self.first : stop - self.first]
        return states
