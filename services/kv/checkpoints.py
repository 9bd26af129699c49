"""Checkpoints from which a sequence with windows or recurrent states can resume."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from services.kv.layer_copy import count_bytes, join_arrays
from services.kv.window import WindowSnapshot

_MOST = 4
"""Per sequence; each holds a copy of every recurrent state and window."""


@dataclass(frozen=True)
class Checkpoint:
    """A point from which the sequence can resume; slots need no copy."""

    length: int
    windows: list[WindowSnapshot]
    others: list[dict[str, Any]]
    ends_turn: bool = False
    """True if a chat message ends here: the next prompt probably shares everything up to here."""

    @property
    def nbytes(self) -> int:
        """Memory of the copies."""
        return count_bytes(list(self.windows)) + count_bytes(self.others)


def add_checkpoint(points: list[Checkpoint], new: Checkpoint) -> None:
    """Add a checkpoint; if there are too many, drop the one with the closest neighbours.

    The last checkpoint at the end of a message is kept, however near the next one is.
    """
    points.append(new)
    if len(points) <= _MOST:
        return
    turn = max((point.length for point in points if point.ends_turn), default=0)
    lengths = [0, *(point.length for point in points)]
    gaps = {
        lengths[i + 2] - lengths[i]: i
        for i in reversed(range(len(points) - 1))
        if points[i].length != turn
    }
    del points[gaps[min(gaps)]]


def read_checkpoint(plain: Any, arrays: Mapping[int, mx.array]) -> Checkpoint:
    """Read the attributes that `layer_copy.split_arrays` was given."""
    joined = join_arrays(plain, arrays)
    windows = [WindowSnapshot(*window) for window in joined["windows"]]
    return Checkpoint(joined["length"], windows, joined["others"], joined["ends_turn"])
