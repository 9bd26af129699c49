"""Whose prompt is computed next: the shortest remaining one, with ageing.

Decided again before every chunk, so that a short prompt does not wait for a long one. A prompt
that has waited four times as long as it still needs goes before any other: none waits for ever.
"""

from dataclasses import dataclass

_TOKENS_PER_S = 500.0
"""Of a model that has not been measured; only the order of prompts depends on it."""
_AGEING = 0.25
"""What a second of waiting is worth, in seconds of work. Less than 1: of two equal prompts the
one in work is finished first."""


@dataclass
class _Waiting:
    tokens: int
    """Still to be computed."""
    since: float
    served_s: float = 0.0


class PrefillOrder:
    """The prompts in work; times in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._tokens_per_s = _TOKENS_PER_S

    def add(self, number: int, tokens: int, now: float) -> None:
        """A sequence has so many tokens to compute."""
        self._waiting[number] = _Waiting(tokens, now)

    def remove(self, number: int) -> None:
        """It is done, or not wanted any more."""
        self._waiting.pop(number, None)

    def on_chunk(self, number: int, tokens: int, seconds: float) -> None:
        """So many of its tokens were computed, in a pass that took so long."""
        one = self._waiting[number]
        one.tokens -= tokens
        one.served_s += seconds
        if tokens and seconds > 0.0:
            self._tokens_per_s = tokens / seconds

    def may_go(self, number: int, room: int, now: float) -> bool:
        """Return whether it may have a part of the next pass, which takes `room` tokens.

        Those before it in the order come first; what they leave is for others.
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
