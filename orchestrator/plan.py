"""What a round does: the modes `ar`, `sd` and `ssd` are one pipeline with different plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from orchestrator.estimates import Estimates
from orchestrator.fan_out import (
    AFTER_REJECTION,
    acceptance_law,
    allocate,
    geometric,
    rounded,
    uniform,
)
from protocol.messages import FanOutPolicy, Mode, Origin

Backup = Literal["draft", "plain"]
"""After a miss the drafter drafts while the target waits, or the target goes on with the
bonus token alone (plain decoding of one token) while the drafter prepares the next round."""

_MAX_DEPTH = 4
_BRANCHES = 16


class Prediction(NamedTuple):
    """What a round is expected to bring."""

    tokens: float
    milliseconds: float


@dataclass(frozen=True)
class Plan:
    """The knobs of a request, and the decisions they leave open."""

    mode: Mode
    estimates: Estimates
    lookahead: int = 0
    """Draft tokens per round; 0 decides each round from what the drafter is sure of."""
    budget: int = 0
    """Branches prepared per round (B); 0 picks the default."""
    policy: FanOutPolicy = "online"

    @property
    def depth(self) -> int:
        """How deep branches are prepared, and the longest draft that is verified."""
        return self.lookahead or _MAX_DEPTH

    @property
    def branches(self) -> int:
        """B, the branches prepared per round."""
        return self.budget or _BRANCHES

    @property
    def backup(self) -> Backup:
        """What follows a miss: with a fixed lookahead the paper's, else no stall."""
        return "draft" if self.lookahead else "plain"

    @property
    def speculates(self) -> bool:
        """Whether the next round is to be speculative; a lookahead fixed by hand always is."""
        if self.mode == "ar":
            return False
        return bool(self.lookahead) or self.estimates.paces[self.mode].speculating

    def length(self, confidences: Sequence[float], origin: Origin) -> int:
        """How many tokens of a draft to verify: most expected tokens per second.

        A chain of m draft tokens yields 1 + sum_i prod_{j<=i} p_j tokens in T_v(m + 1).
        """
        if self.lookahead:
            return min(self.lookahead, len(confidences))
        best, best_speed = 0, 0.0
        for count in range(len(confidences) + 1):
            expected = self.expect(confidences[:count], origin)
            speed = expected.tokens / expected.milliseconds
            if speed > best_speed:
                best, best_speed = count, speed
        return best

    def expect(self, confidences: Sequence[float], origin: Origin) -> Prediction:
        """What verifying a draft of these confidences brings."""
        calibration = self.estimates.calibrations[origin]
        tokens, reached = 1.0, 1.0
        for confidence in confidences:
            reached *= calibration.rate(confidence)
            tokens += reached
        cost = self.estimates.verify_cost if self.speculates else self.estimates.plain_cost
        return Prediction(
            tokens, cost.of(len(confidences) + 1) + self.estimates.idle_ms[origin].value
        )

    def fan_out(self, confidences: Sequence[float], origin: Origin) -> list[int]:
        """F_0..F_K for a chain from `origin` whose draft tokens have these confidences."""
        learned = self.estimates
        match self.policy:
            case "uniform":
                return uniform(self.branches, len(confidences))
            case "geometric":
                alpha = min(0.95, max(0.05, learned.acceptance.value))
                lookahead = len(confidences)
                return rounded(geometric(alpha, AFTER_REJECTION.exponent, self.branches, lookahead))
            case "online":
                rates = [learned.calibrations[origin].rate(c) for c in confidences]
                return allocate(
                    acceptance_law(rates),
                    self.branches,
                    learned.after_rejection[origin],
                    learned.after_all[origin],
                )
