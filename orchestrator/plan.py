"""What a round does: the modes `ar`, `sd` and `ssd` are one pipeline with different plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.estimates import Estimates
from orchestrator.fan_out import acceptance_law, allocate
from protocol.messages import Mode

Backup = Literal["draft", "plain"]
"""After a miss the drafter drafts while the target waits, or the target goes on with the
bonus token alone (plain decoding of one token) while the drafter prepares the next round."""

_MAX_DEPTH = 4
_BRANCHES = 16


@dataclass(frozen=True)
class Plan:
    """The knobs of a request, and the decisions they leave open."""

    mode: Mode
    estimates: Estimates
    lookahead: int = 0
    """Draft tokens per round; 0 decides each round from what the drafter is sure of."""
    budget: int = 0
    """Branches prepared per round (B); 0 picks the default."""
    sampled: bool = False
    """Drafts are drawn at random (rejection rule): what was drawn must not decide its use."""

    @property
    def held_back(self) -> int:
        """For Saguaro sampling: branches that a row can expect (F), at least one."""
        return max(1, (self.budget or _BRANCHES) // (self.depth + 1))

    @property
    def depth(self) -> int:
        """How deep branches are prepared, and the longest draft that is verified."""
        return self.lookahead or _MAX_DEPTH

    @property
    def backup(self) -> Backup:
        """What follows a miss: with a fixed lookahead the paper's, else no stall."""
        return "draft" if self.lookahead else "plain"

    def length(self, confidences: Sequence[float]) -> int:
        """How many tokens of a draft to verify: most expected tokens per second.

        A chain of m draft tokens yields 1 + sum_i prod_{j<=i} p_j tokens in T_v(m + 1).
        """
        if self.lookahead:
            return min(self.lookahead, len(confidences))
        if self.sampled:
            return self._unseen_length(confidences)
        cost = self.estimates.verify_cost
        best, best_speed = 0, 1.0 / cost.of(1)
        expected, reached = 1.0, 1.0
        for count, confidence in enumerate(confidences, start=1):
            reached *= self.estimates.calibration.rate(confidence)
            expected += reached
            speed = expected / cost.of(count + 1)
            if speed > best_speed:
                best, best_speed = count, speed
        return best

    def _unseen_length(self, confidences: Sequence[float]) -> int:
        """The length where no token, nor what follows it, has a say in its own use.

        Each confidence belongs to the law of a token, and so depends on the tokens before it.
        A token is used if going on pays, were all that follow as sure as this one.
        """
        cost = self.estimates.verify_cost
        expected, reached = 1.0, 1.0
        for count, confidence in enumerate(confidences):
            rate = self.estimates.calibration.rate(confidence)
            ahead, chance, best = expected, reached, 0.0
            for length in range(count + 1, len(confidences) + 1):
                chance *= rate
                ahead += chance
                best = max(best, ahead / cost.of(length + 1))
            if best <= expected / cost.of(count + 1):
                return count
            reached *= rate
            expected += reached
        return len(confidences)

    def fan_out(self, confidences: Sequence[float]) -> list[int]:
        """F_0..F_K for a chain whose draft tokens have these confidences."""
        rates = [self.estimates.calibration.rate(confidence) for confidence in confidences]
        return allocate(acceptance_law(rates), self.budget or _BRANCHES)
