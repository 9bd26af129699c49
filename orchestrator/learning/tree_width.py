"""How many branches to prepare (B): more of them hit more often, fewer grow deeper in time."""

from collections.abc import Sequence

from orchestrator.learning.averages import smooth
from orchestrator.learning.snapshot import Widths

WIDTHS = (4, 8, 16, 32)
"""A few fixed values: on some devices every new shape costs a compilation."""

_FIRST = 2
_EXPLORE = 16
"""Once in this many rounds a neighbouring width is tried, so that its cost is known."""
_BETTER = 1.02
"""A width is left for one that promises at least this much more."""


class TreeWidth:
    """The width in use; fed with what each width would have gained."""

    def __init__(self) -> None:
        self._gains = [0.0] * len(WIDTHS)
        self._chosen = _FIRST
        self._rounds = 0

    @property
    def branches(self) -> int:
        """B for the next round."""
        index = self._chosen
        if self._rounds % _EXPLORE == _EXPLORE // 2:
            wider = self._rounds // _EXPLORE % 2
            index = min(len(WIDTHS) - 1, index + 1) if wider else max(0, index - 1)
        return WIDTHS[index]

    def observe(self, gains: Sequence[float]) -> None:
        """What a round would have gained by each of WIDTHS, in tokens."""
        self._rounds += 1
        pairs = zip(self._gains, gains, strict=True)
        self._gains = [smooth(mean, gain) for mean, gain in pairs]
        best = self._gains.index(max(self._gains))
        if self._gains[best] > _BETTER * self._gains[self._chosen]:
            self._chosen = best

    def save(self) -> Widths:
        """For a snapshot."""
        return Widths(gains=list(self._gains), chosen=self._chosen)

    def restore(self, saved: Widths) -> None:
        """Start from a snapshot: with the width that was best."""
        if len(saved.gains) == len(WIDTHS) > saved.chosen:
            self._gains, self._chosen = list(saved.gains), saved.chosen


def gains_by_depth(alpha: float, speed: float, verify_ms: Sequence[float]) -> list[float]:
    """What a hit with a draft of 0, 1, ... tokens gains over one without, in tokens.

    Args:
        alpha: rate at which its tokens are accepted.
        speed: tokens per millisecond that time could bring instead.
        verify_ms: T_v(1), T_v(2), ...
    """
    gains, best, tokens = [0.0], 0.0, 0.0
    for drafted in range(1, len(verify_ms)):
        tokens += alpha**drafted
        best = max(best, tokens - speed * (verify_ms[drafted] - verify_ms[0]))
        gains.append(best)
    return gains


def interpolate(values: Sequence[float], place: float) -> float:
    """A value at a place between two of them, or at the nearer end."""
    place = min(max(place, 0.0), len(values) - 1.0)
    left = min(int(place), len(values) - 2)
    return values[left] + (place - left) * (values[left + 1] - values[left])
