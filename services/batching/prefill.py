"""How much of a prompt is computed at a time, so that a new request does not stall the others."""

_STALL_S = 0.25
"""How long the answers that are being decoded may wait for a piece of another's prompt."""
_FIRST = 32
_LEAST = 16


class ChunkSizer:
    """Learns how fast prompts are computed; fed with every chunk."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._tokens_per_s = 0.0

    def size(self, *, alone: bool) -> int:
        """Tokens of the next chunk; `alone` if nobody waits meanwhile."""
        if alone:
            return self._step
        if not self._tokens_per_s:
            return min(self._step, _FIRST)
        return min(self._step, max(_LEAST, int(_STALL_S * self._tokens_per_s)))

    def took(self, tokens: int, seconds: float) -> None:
        """A chunk was computed."""
        if seconds > 0.0:
            self._tokens_per_s = tokens / seconds
