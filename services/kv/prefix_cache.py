"""States of finished sequences, for those that start with the same tokens (a chat's next turn).

Nothing is copied: MLX arrays are values, so a fork shares buffers with its source until either of
them writes, and never sees the other's writes.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.messages import Tokens
from services.kv.state import SequenceState


class CachedPrefix(NamedTuple):
    """A sequence's state and the tokens it actually holds."""

    tokens: Tokens
    state: SequenceState


class PrefixCache:
    """The most recently used states, bounded in number and bytes."""

    def __init__(self, most: int = 0, most_bytes: int = 0) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: list[CachedPrefix] = []
        """Least recently used first."""

    def keep(self, held: CachedPrefix) -> None:
        """Add a finished sequence; drop the one that it continues."""
        length = held.state.resumable(len(held.tokens))
        held = CachedPrefix(held.tokens[:length], held.state)
        if not self._most or not held.tokens:
            return
        size = len(held.tokens)
        self._kept = [
            old
            for old in self._kept
            if len(old.tokens) > size or old.tokens != held.tokens[: len(old.tokens)]
        ]
        self._kept.append(held)
        while len(self._kept) > self._most or self.nbytes > self._most_bytes:
            self._kept.pop(0)

    def drop_oldest(self) -> bool:
        """Drop the least recently used state; False if there is none."""
        if not self._kept:
            return False
        del self._kept[0]
        return True

    def clear(self) -> None:
        """Drop all states."""
        self._kept = []

    def fork(self, tokens: Tokens, running: Iterable[CachedPrefix] = ()) -> SequenceState | None:
        """Fork the state with the longest resumable prefix of `tokens`.

        Candidates are the states kept here and those in `running`.
        """
        prompt = np.array(tokens, dtype=np.int64)
        candidates = [*self._kept, *running]
        lengths = [_common(prompt, held) for held in candidates]
        length = max(lengths, default=0)
        if length == 0:
            return None
        best = lengths.index(length)
        if best < len(self._kept):
            self._kept.append(self._kept.pop(best))
        return candidates[best].state.fork(length)

    @property
    def is_enabled(self) -> bool:
        """True if anything can be kept."""
        return bool(self._most and self._most_bytes)

    @property
    def kept(self) -> tuple[CachedPrefix, ...]:
        """All states kept, the least recently used first."""
        return tuple(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory of the states kept; shared buffers count for each."""
        return sum(held.state.nbytes for held in self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def _common(wanted: npt.NDArray[np.int64], held: CachedPrefix) -> int:
    """Return the length of the longest common prefix that can be resumed."""
    size = min(len(wanted), len(held.tokens))
    other = np.array(held.tokens[:size], dtype=np.int64)
    different = np.flatnonzero(wanted[:size] != other)
    return held.state.resumable(int(different[0]) if different.size else size)
