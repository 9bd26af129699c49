"""What the branches that a drafter prepares would gain: by their number, and by how they grow."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

from orchestrator.learning.fan_out import acceptance_distribution, count_children, hit_chances
from orchestrator.learning.round_observation import RoundObservation
from orchestrator.learning.tree_growth import GROWN, value_by_depth

if TYPE_CHECKING:
    from orchestrator.learning.cost_model import CostModel

_MOST_ROWS = 32
"""Draft tokens of the largest tree whose worth is weighed."""
_SHORTEST_MS = 1e-3
"""A clock may be too coarse to see a tree step."""


class PreparationGains:
    """In tokens, of what is prepared beside a round.

    Args:
        known: what was measured so far.
    """

    def __init__(self, known: "CostModel") -> None:
        self._known = known

    def hits_by_width(self, seen: RoundObservation) -> list[float]:
        """Chances of a hit with 0, 1, ... branches prepared beside this round."""
        rates = self._known.acceptance_rates(seen.confidences, seen.shape, seen.origin)
        return hit_chances(
            acceptance_distribution(rates, seen.shape),
            self._known.branches,
            self._known.after_rejection[seen.origin],
            self._known.after_all[seen.origin],
            count_children(seen.shape),
        )

    def cost_of_delay(self, seen: RoundObservation, speed: float) -> float:
        """What shallower trees cost if the next round begins unasked, in milliseconds a round.

        The drafter hears of it later than the verifier, and of what it drafts the end comes too
        late: it loses both ways, each as long as what the verifier saves.
        """
        handover, branches = self._known.handover, self._known.branches
        time_ms = seen.verify_ms + handover.asked_ms
        longest, delayed_ms = seen.longest_draft, time_ms - 2.0 * handover.saved_ms
        in_time = self._gain_of_time(time_ms, branches, longest, speed)
        delayed = self._gain_of_time(delayed_ms, branches, longest, speed)
        hits = self.hits_by_width(seen)
        return hits[branches] * (in_time - delayed) / speed if speed else 0.0

    def _gain_of_time(self, time_ms: float, branches: int, longest: int, speed: float) -> float:
        """What a hit gains, in tokens, by the depth that so many branches reach in this time."""
        # However long drafts are now: fewer branches would make longer ones.
        costs = [self._known.verify_latency.of(drafted + 1) for drafted in range(longest + 1)]
        gains = gains_by_depth(self._known.acceptance["hit"].value, speed, costs)
        step_ms = max(_SHORTEST_MS, self._known.step_latency.of(branches))
        return interpolate(gains, (time_ms - self._known.step_latency.chain_ms) / step_ms)

    def by_growth(self, seen: RoundObservation, speed: float) -> list[float]:
        """What the trees gain that are prepared beside this round, by each of GROWN."""
        branches = self._known.branches
        hits = self.hits_by_width(seen)[: branches + 1]
        outcomes = [more - less for less, more in pairwise(hits)]
        ranks = self._known.rank_chances
        row_ms = [self._known.tree_latency.of(rows) for rows in range(1, _MOST_ROWS + 2)]
        costs = [speed * max(0.0, more - less) for less, more in pairwise(row_ms)]
        time_ms = seen.verify_ms + self._known.idle_ms["hit"].value
        time_ms -= self._known.step_latency.chain_ms
        deepest = ceil(self._known.draft_length) + 2
        gains = []
        for grown in GROWN:
            step_ms = max(_SHORTEST_MS, self._known.step_latency.of(branches + grown))
            depth = min(float(deepest), max(0.0, time_ms / step_ms))
            gains.append(value_by_depth(outcomes, ranks, grown, depth, costs))
        return gains


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
