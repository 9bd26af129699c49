"""Order of prompts: the shortest remaining one first, with ageing.

The order is decided again before every chunk, so that a short prompt does not wait for a long one.
A prompt that has waited four times as long as it still needs goes before any other: none waits for
ever.
"""

from dataclasses import dataclass

_TOKENS_PER_S = 500.0
"""Default speed of a model that has not been measured; only the order depends on it."""
_AGEING = 0.25
"""Seconds of work that a second of waiting counts for.

It is less than 1, so that of two equal prompts the one in progress is finished first.
"""


@dataclass
class _Waiting:
    tokens: int
    """Still to be computed."""
    since: float
    served_s: float = 0.0


class PrefillOrder:
    """The prompts in progress; times in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._tokens_per_s = _TOKENS_PER_S

    def add(self, number: int, tokens: int, now: float) -> None:
        """Add a sequence with `tokens` tokens to compute."""
        self._waiting[number] = _Waiting(tokens, now)

    def remove(self, number: int) -> None:
        """Remove a finished or cancelled sequence."""
        self._waiting.pop(number, None)

    def on_chunk(self, number: int, tokens: int, seconds: float) -> None:
        """Record a computed chunk of `tokens` tokens and the duration of its pass."""
        one = self._waiting[number]
        one.tokens -= tokens
        one.served_s += seconds
        if tokens and seconds > 0.0:
            self._tokens_per_s = tokens / seconds

    def may_go(self, number: int, room: int, now: float) -> bool:
        """Return True if it may use part of the next pass, which takes `room` tokens.

        Sequences before it in the order come first; the room they leave is for others.
        """
        for other in sorted(self._waiting, key=lambda one: self._key(one, now)):
            if other == number:
                return True
            room -= self._waiting[other].tokens
            if room <= 0:
                return False
        return True

    def _key(self, number: int, now: float) -> tuple[float, int]:
        one = self._waiting[number]
        waited_s = max(0.0, now - one.since - one.served_s)
        return one.tokens / self._tokens_per_s - _AGEING * waited_s, number
