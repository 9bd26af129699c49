"""The features of a sequence's committed tokens, kept for a drafter that starts later."""

from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.messages import FeatureRequest

Rows = npt.NDArray[Any]
"""[tokens, width]"""


class FeatureLog:
    """Rows of consecutive positions up to `end`, the last `window` of them.

    Args:
        request: describes the rows.
    """

    def __init__(self, request: FeatureRequest) -> None:
        self.request = request
        self.end = 0
        self._parts: list[Rows] = []
        self._count = 0
        """Rows in all parts; a long answer has one part per round."""

    @property
    def first(self) -> int:
        """Position of the first row."""
        return self.end - self._count

    def append(self, position: int, rows: Rows) -> None:
        """Append rows from `position` on; start anew if one is missing before them."""
        if position < self.first or position > self.end:
            self._parts, self._count = [], 0
        elif position < self.end:
            self.trim(position)
        self._parts.append(rows)
        self._count += len(rows)
        self.end = position + len(rows)
        while self._count - len(self._parts[0]) >= self.request.window:
            self._count -= len(self._parts.pop(0))

    def trim(self, length: int) -> None:
        """Drop the rows from `length` on."""
        while self._parts and self.end > length:
            last = self._parts.pop()
            kept = last[: max(0, len(last) - (self.end - length))]
            self.end -= len(last) - len(kept)
            self._count -= len(last) - len(kept)
            if len(kept):
                self._parts.append(kept)
        self.end = min(self.end, length)

    def fork(self, length: int) -> "FeatureLog":
        """Return an independent log of the rows before `length`."""
        new = FeatureLog(self.request)
        new.end, new._parts, new._count = self.end, list(self._parts), self._count
        new.trim(length)
        return new

    def blocks(self, most_bytes: int) -> list[tuple[int, Rows]]:
        """Return all rows in blocks of at most `most_bytes` or one row: (first position, rows)."""
        if not self._parts:
            return []
        rows = np.concatenate(self._parts)
        step = max(1, most_bytes // rows[0].nbytes)
        return [(self.first + i, rows[i : i + step]) for i in range(0, len(rows), step)]
