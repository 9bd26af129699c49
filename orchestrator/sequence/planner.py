"""What a round does: the modes `ar`, `sd` and `ssd` are one pipeline with different plans.

A decision is worth its expected tokens, less what its time could have brought at the speed
of late (renewal reward): maximising tokens - speed * time each round maximises the tokens
per second of the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.fan_out import (
    AFTER_REJECTION,
    acceptance_law,
    allocate,
    geometric,
    rounded,
    uniform,
)
from protocol.messages import FanOutPolicy, Mode, Origin

_DEEPEST = 16
_BEYOND = 2
"""Branches are prepared so much deeper than what was worth verifying of late."""
_LEAST_BRANCHES = 2


class Prediction(NamedTuple):
    """What a round is expected to bring."""

    tokens: float
    milliseconds: float


@dataclass(frozen=True)
class Planner:
    """The knobs of a request, and the decisions they leave open."""

    mode: Mode
    estimates: CostModel
    num_draft_tokens: int = 0
    """Draft tokens per round; 0 decides each round from what the drafter is sure of."""
    budget: int = 0
    """Branches prepared per round (B); 0 follows what wider and deeper trees would gain."""
    policy: FanOutPolicy = "online"
    sampled: bool = False
    """Drafts are drawn at random (rejection rule): what was drawn must not decide its use."""
    tried_saguaro: float | None = None
    """C that was chosen for this request, whose speed is to be judged."""

    @property
    def held_back(self) -> int:
        """For Saguaro sampling: branches that a row can expect (F), at least one."""
        return max(1, self.branches // (self.depth + 1))

    @property
    def depth(self) -> int:
        """How deep branches are prepared, and the longest draft that is verified."""
        return self.num_draft_tokens or min(_DEEPEST, ceil(self.estimates.reach) + _BEYOND)

    @property
    def branches(self) -> int:
        """B, the branches prepared per round."""
        # The drafter works for all requests in the time of one pass.
        share = self.estimates.width.branches // self.estimates.crowd.streams
        return self.budget or max(_LEAST_BRANCHES, share)

    @property
    def speculates(self) -> bool:
        """Whether the next round is to be speculative; a lookahead fixed by hand always is."""
        if self.mode == "ar":
            return False
        pace = self.estimates.pace(self.mode)
        return bool(self.num_draft_tokens) or (pace is not None and pace.speculating)

    @property
    def is_paused(self) -> bool:
        """Whether the drafter is left out because it did not pay; what costs nothing goes on."""
        pace = self.estimates.pace(self.mode)
        return pace is not None and pace.pausing

    @property
    def plain_tok_s(self) -> float:
        """Speed of plain decoding beside which speculation is judged; 0 if never measured."""
        pace = self.estimates.pace(self.mode)
        return pace.plain_tok_s / self.estimates.crowd.scale if pace is not None else 0.0

    def backup(self, looked_up: Sequence[float] = ()) -> int:
        """After a miss, how many tokens are drafted while the target waits.

        With 0 the target does not wait: it goes on with what was looked up, if that pays, or
        with the bonus token alone, plain decoding of one token, while the drafter prepares the
        next round.

        Args:
            looked_up: confidences of what lookup found.
        """
        if self.num_draft_tokens:
            return self.num_draft_tokens
        if self.estimates.crowd.company:
            return 0  # the pass that the others are part of would leave without this request
        values = self.value_of_waiting([])
        count = values.index(max(values))
        return count if values[count] > max(self._worth_of_lookup(looked_up)) else 0

    def looked_up(self, confidences: Sequence[float], *, alone: bool = False) -> int:
        """How many tokens to verify of what was looked up; `alone`: no drafter works beside."""
        values = self._worth_of_lookup(confidences, alone=alone)
        return values.index(max(values))

    def _worth_of_lookup(self, confidences: Sequence[float], *, alone: bool = False) -> list[float]:
        """What verifying 0, 1, ... of these tokens is worth, in tokens."""
        rates = self._rates(confidences, "lookup")
        if not alone or self.estimates.crowd.company:
            return [self._value(rates[:count]) for count in range(len(rates) + 1)]
        cost = self.estimates.plain_cost
        speed = 1.0 / cost.of(1)
        counts = range(len(rates) + 1)
        return [_expected(rates[:count]) - speed * cost.of(count + 1) for count in counts]

    @property
    def sequential(self) -> int:
        """At most so many tokens are drafted between two verifications (mode `sd`)."""
        untried = not self.estimates.draft_token_ms
        return self.depth if self.num_draft_tokens or untried or self._more([]) else 0

    def should_extend(self, confidences: Sequence[float]) -> bool:
        """Whether the target should wait for another token behind those of a backup.

        It depends on what is drafted already, and is verified, not on what would come.
        """
        return bool(self.num_draft_tokens) or self._more(self._rates(confidences, "miss")) > 0

    def _more(self, rates: Sequence[float]) -> int:
        """How many tokens to draft behind those with these rates while the target waits."""
        values = self.value_of_waiting(rates)
        return values.index(max(values))

    def value_of_waiting(self, rates: Sequence[float]) -> list[float]:
        """What waiting for 0, 1, ... tokens behind those with these rates is worth, in tokens."""
        rate, token_ms = self.estimates.backup_rate, self.estimates.draft_token_ms
        if not token_ms:
            return [self._value(rates)]  # nothing was drafted yet
        # While one request waits, the target works for the others.
        token_cost = self._speed / self.estimates.crowd.streams * token_ms
        return [
            self._value([*rates, *[rate] * count]) - count * token_cost
            for count in range(max(0, self.depth - len(rates)) + 1)
        ]

    def length(self, confidences: Sequence[float], origin: Origin) -> int:
        """How many tokens of a draft to verify: as many as are worth their time."""
        if self.num_draft_tokens:
            return min(self.num_draft_tokens, len(confidences))
        if origin == "lookup":
            return len(confidences)  # `looked_up` has decided
        rates = self._rates(confidences, origin)
        if self.sampled:
            return self._unseen_length(rates)
        values = [self._value(rates[:count]) for count in range(len(rates) + 1)]
        return values.index(max(values))

    def _unseen_length(self, rates: Sequence[float]) -> int:
        """The length where no token, nor what follows it, has a say in its own use.

        Each rate belongs to the law of a token, and so depends on the tokens before it.
        A token is used if going on pays, were all that follow as sure as this one.
        """
        for count, rate in enumerate(rates):
            used = list(rates[:count])
            ahead = range(1, len(rates) - count + 1)
            if max(self._value(used + [rate] * more) for more in ahead) <= self._value(used):
                return count
        return len(rates)

    def _rates(self, confidences: Sequence[float], origin: Origin) -> list[float]:
        calibration = self.estimates.calibrations[origin]
        return [calibration.rate(confidence) for confidence in confidences]

    def _value(self, rates: Sequence[float]) -> float:
        """What verifying a draft with these acceptance rates is worth, in tokens.

        A chain of m draft tokens yields 1 + sum_i prod_{j<=i} p_j tokens in T_v(m + 1), or in
        what it adds to a pass that others are part of.
        """
        company = self.estimates.crowd.company
        shared = self._cost_of(company) if company else 0.0
        return _expected(rates) - self._speed * (self._cost(len(rates)) - shared)

    def _cost(self, drafted: int) -> float:
        """Time of the pass, with this many draft tokens of ours."""
        return self._cost_of(self.estimates.crowd.company + drafted + 1)

    def _cost_of(self, tokens: int) -> float:
        learned = self.estimates
        return (learned.verify_cost if self.speculates else learned.plain_cost).of(tokens)

    @property
    def _speed(self) -> float:
        """Tokens per millisecond of late, of all requests; at first, plain decoding's."""
        pace, crowd = self.estimates.pace(self.mode), self.estimates.crowd
        known = pace.speculative_tok_s if pace is not None else 0.0
        measured = crowd.scale * known / 1e3
        return measured or crowd.streams / self.estimates.verify_cost.of(crowd.streams)

    def expect(self, confidences: Sequence[float], origin: Origin) -> Prediction:
        """What verifying a draft of these confidences brings."""
        rates = self._rates(confidences, origin)
        waiting = self.estimates.idle_ms[origin].value
        return Prediction(_expected(rates), self._cost(len(rates)) + waiting)

    def fan_out(self, confidences: Sequence[float], origin: Origin) -> list[int]:
        """F_0..F_K for a chain from `origin` whose draft tokens have these confidences."""
        learned = self.estimates
        match self.policy:
            case "uniform":
                return uniform(self.branches, len(confidences))
            case "geometric":
                alpha = min(0.95, max(0.05, learned.acceptance["hit"].value))
                num_draft_tokens = len(confidences)
                return rounded(
                    geometric(alpha, AFTER_REJECTION.exponent, self.branches, num_draft_tokens)
                )
            case "online":
                return allocate(
                    acceptance_law(self._rates(confidences, origin)),
                    self.branches,
                    learned.after_rejection[origin],
                    learned.after_all[origin],
                )


def _expected(rates: Sequence[float]) -> float:
    tokens, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        tokens += reached
    return tokens
