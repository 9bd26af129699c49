"""Which weight C Saguaro sampling gives the tokens that are prepared for, where it may choose.

A smaller C means more hits for fewer accepted tokens; which of the two wins depends on the
pair, the text and the machine. So each request that leaves C open tries one of a few, and
its speed, tokens over time, is the measure of both effects at once. The choice is that of
an upper confidence bound: what is known to be slower is tried ever more rarely.

C is chosen before a request begins and by other requests' speed alone, never by what is
drawn in this one, so the rejection rule stays exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log, sqrt

from orchestrator.learning.snapshot import Arm

CHOICES = (1.0, 0.6, 0.4, 0.2)

_FADE = 0.998
"""Old rounds fade, so that the choice follows the text."""

_RECALLED = 30.0
"""Most rounds that a restored choice counts for."""

_CURIOSITY = 1.0
"""How many standard errors are added to a speed before it is compared."""


@dataclass
class _Arm:
    rounds: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    """Of the tokens of each round."""
    milliseconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.milliseconds if self.milliseconds > 0.0 else 0.0

    @property
    def error(self) -> float:
        """Standard error of the speed."""
        mean = self.tokens / self.rounds
        variance = max(0.25, self.squares / self.rounds - mean**2)
        return self.speed / mean * sqrt(variance / self.rounds)


class SaguaroChoice:
    """Measures which C is fastest."""

    def __init__(self) -> None:
        self._arms = {weight: _Arm() for weight in CHOICES}

    def choose(self) -> float:
        """C for the next request."""
        return max(CHOICES, key=self._upper_bound)

    def _upper_bound(self, weight: float) -> float:
        arm = self._arms[weight]
        if arm.rounds == 0.0 or arm.milliseconds == 0.0:
            return inf  # the first untried one
        total = sum(other.rounds for other in self._arms.values())
        return arm.speed + _CURIOSITY * sqrt(2.0 * log(1.0 + total / arm.rounds)) * arm.error

    def observe(self, weight: float, tokens: int, milliseconds: float) -> None:
        """A round at this C emitted `tokens` tokens in this time."""
        arm = self._arms.get(weight)
        if arm is None:
            return
        for other in self._arms.values():
            other.rounds *= _FADE
            other.tokens *= _FADE
            other.squares *= _FADE
            other.milliseconds *= _FADE
        arm.rounds += 1.0
        arm.tokens += tokens
        arm.squares += tokens**2
        arm.milliseconds += milliseconds

    def save(self) -> dict[str, Arm]:
        """For a snapshot."""
        return {
            str(weight): Arm(
                rounds=arm.rounds,
                tokens=arm.tokens,
                squares=arm.squares,
                milliseconds=arm.milliseconds,
            )
            for weight, arm in self._arms.items()
            if arm.rounds > 0.0
        }

    def restore(self, saved: Mapping[str, Arm]) -> None:
        """Start from a snapshot."""
        for weight in CHOICES:
            arm = saved.get(str(weight))
            if arm is None or arm.rounds <= 0.0 or arm.tokens <= 0.0:
                continue
            kept = min(1.0, _RECALLED / arm.rounds)
            self._arms[weight] = _Arm(
                kept * arm.rounds, kept * arm.tokens, kept * arm.squares, kept * arm.milliseconds
            )
