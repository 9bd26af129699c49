"""Decides each round: the modes `ar`, `sd` and `ssd` are one pipeline with different plans.

A decision is worth its expected tokens, less what its time could have brought at the recent
throughput (renewal reward): maximising tokens - throughput * time in each round maximises the
tokens per second of the whole. docs/planner.md explains every decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.fan_out import (
    AFTER_REJECTION,
    acceptance_distribution,
    allocate,
    geometric,
    round_shares,
    uniform,
)
from protocol.messages import FanOutPolicy, Mode, Origin

_DEEPEST = 16
_BEYOND = 2
"""How much deeper branches are prepared than drafts were worth verifying recently."""
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
    """Draft tokens per round; 0 decides each round by the drafter's confidences."""
    fixed_branches: int = 0
    """Branches prepared per round (B); 0 follows what wider and deeper trees would gain."""
    policy: FanOutPolicy = "online"
    sampled: bool = False
    """Drafts are drawn at random (rejection rule): what was drawn must not decide its use."""
    tried_saguaro: float | None = None
    """C that was chosen for this request, whose speed is to be measured."""

    # ------------------------------------------------------------ speculate or not

    @property
    def should_speculate(self) -> bool:
        """Whether the next round is to be speculative; with a fixed draft length it always is."""
        if self.mode == "ar":
            return False
        switch = self.estimates.switch(self.mode)
        return bool(self.num_draft_tokens) or (switch is not None and switch.speculating)

    @property
    def is_paused(self) -> bool:
        """Whether the drafter is left out because it did not pay; prompt lookup, free, goes on."""
        switch = self.estimates.switch(self.mode)
        return switch is not None and switch.is_paused

    @property
    def plain_tok_s(self) -> float:
        """Speed of plain decoding, as measured in this run and not long ago; else 0."""
        switch = self.estimates.switch(self.mode)
        measured = switch.measured_plain_tok_s if switch is not None else 0.0
        return measured / self.estimates.batch.scale

    # ------------------------------------------------------------ what to verify

    def verify_length(self, confidences: Sequence[float], origin: Origin) -> int:
        """How many tokens of a draft to verify: as many as are worth their time."""
        if self.num_draft_tokens:
            return min(self.num_draft_tokens, len(confidences))
        if origin == "lookup":
            return len(confidences)  # `lookup_length` has decided
        rates = self._acceptance_rates(confidences, origin)
        if self.sampled:
            return self._length_if_sampled(rates)
        return _best([self._value(rates[:count]) for count in range(len(rates) + 1)])

    def _length_if_sampled(self, rates: Sequence[float]) -> int:
        """The length where neither a token nor what follows it influences its own use.

        Each rate belongs to the distribution of a token, and so depends on the tokens before
        it. A token is used if going on pays, supposing that all that follow are as sure.
        """
        for count, rate in enumerate(rates):
            used = list(rates[:count])
            ahead = range(1, len(rates) - count + 1)
            if max(self._value(used + [rate] * more) for more in ahead) <= self._value(used):
                return count
        return len(rates)

    def lookup_length(self, confidences: Sequence[float], *, alone: bool = False) -> int:
        """How many tokens of a prompt lookup to verify; `alone`: no drafter works beside."""
        return _best(self._lookup_values(confidences, alone=alone))

    def _lookup_values(self, confidences: Sequence[float], *, alone: bool = False) -> list[float]:
        """What verifying 0, 1, ... of these tokens is worth, in tokens."""
        rates = self._acceptance_rates(confidences, "lookup")
        counts = range(len(rates) + 1)
        if not alone or self.estimates.batch.other_tokens:
            return [self._value(rates[:count]) for count in counts]
        plain = self.estimates.plain_latency
        throughput = 1.0 / plain.of(1)
        return [
            _count_expected(rates[:count]) - throughput * plain.of(count + 1) for count in counts
        ]

    # ------------------------------------------------------------ what to wait for

    def backup_length(self, looked_up: Sequence[float] = ()) -> int:
        """After a miss, how many tokens to draft while the target waits.

        With 0 the target does not wait: it verifies a prompt lookup, if that pays, or the
        bonus token alone, plain decoding of one token, while the drafter prepares the next
        round.

        Args:
            looked_up: confidences of the prompt lookup.
        """
        if self.num_draft_tokens:
            return self.num_draft_tokens
        if self.estimates.batch.other_tokens:
            return 0  # the pass of the others would leave without this request
        values = self.value_of_waiting([])
        count = _best(values)
        return count if values[count] > max(self._lookup_values(looked_up)) else 0

    @property
    def sequential_length(self) -> int:
        """Most tokens to draft between two verifications (mode `sd`)."""
        unmeasured = not self.estimates.draft_token_ms
        pays = self.num_draft_tokens or unmeasured or _best(self.value_of_waiting([]))
        return self.depth if pays else 0

    def should_extend(self, confidences: Sequence[float]) -> bool:
        """Whether the target should wait for another token behind those of a backup.

        It depends on what is drafted already, and is verified, not on what would come.
        """
        if self.num_draft_tokens:
            return True
        return _best(self.value_of_waiting(self._acceptance_rates(confidences, "miss"))) > 0

    def value_of_waiting(self, rates: Sequence[float]) -> list[float]:
        """What waiting for 0, 1, ... tokens behind those with these rates is worth, in tokens."""
        rate, token_ms = self.estimates.backup_rate, self.estimates.draft_token_ms
        if not token_ms:
            return [self._value(rates)]  # nothing was drafted yet
        # While one request waits, the target works for the others.
        token_cost = self.throughput / self.estimates.batch.streams * token_ms
        return [
            self._value([*rates, *[rate] * count]) - count * token_cost
            for count in range(max(0, self.depth - len(rates)) + 1)
        ]

    # ------------------------------------------------------------ what to prepare

    @property
    def depth(self) -> int:
        """How deep branches are prepared, and the longest draft that is verified."""
        usual = ceil(self.estimates.draft_length) + _BEYOND
        return self.num_draft_tokens or min(_DEEPEST, usual)

    @property
    def branches(self) -> int:
        """B, the branches prepared per round."""
        # The drafter works for all requests in the time of one pass.
        share = self.estimates.tree_width.branches // self.estimates.batch.streams
        return self.fixed_branches or max(_LEAST_BRANCHES, share)

    @property
    def held_back(self) -> int:
        """For Saguaro sampling: branches that a row can expect (F), at least one."""
        return max(1, self.branches // (self.depth + 1))

    def fan_out(self, confidences: Sequence[float], origin: Origin) -> list[int]:
        """F_0..F_K for a chain from `origin` whose draft tokens have these confidences."""
        estimates, length = self.estimates, len(confidences)
        match self.policy:
            case "uniform":
                return uniform(self.branches, length)
            case "geometric":
                alpha = min(0.95, max(0.05, estimates.acceptance["hit"].value))
                shares = geometric(alpha, AFTER_REJECTION.exponent, self.branches, length)
                return round_shares(shares)
            case "online":
                return allocate(
                    acceptance_distribution(self._acceptance_rates(confidences, origin)),
                    self.branches,
                    estimates.after_rejection[origin],
                    estimates.after_all[origin],
                )

    # ------------------------------------------------------------ what that is worth

    def predict(self, confidences: Sequence[float], origin: Origin) -> Prediction:
        """What verifying a draft of these confidences brings."""
        rates = self._acceptance_rates(confidences, origin)
        waiting = self.estimates.idle_ms[origin].value
        return Prediction(_count_expected(rates), self._verify_ms(len(rates)) + waiting)

    @property
    def throughput(self) -> float:
        """Recent tokens per millisecond of all requests; at first, plain decoding's."""
        switch, batch = self.estimates.switch(self.mode), self.estimates.batch
        known = switch.speculative_tok_s if switch is not None else 0.0
        measured = batch.scale * known / 1e3
        return measured or batch.streams / self.estimates.verify_latency.of(batch.streams)

    def _acceptance_rates(self, confidences: Sequence[float], origin: Origin) -> list[float]:
        calibration = self.estimates.calibrations[origin]
        return [calibration.rate(confidence) for confidence in confidences]

    def _value(self, rates: Sequence[float]) -> float:
        """What verifying a draft with these acceptance rates is worth, in tokens.

        A chain of m draft tokens yields 1 + sum_i prod_{j<=i} p_j tokens in T_v(m + 1), or in
        what it adds to a pass that others are part of.
        """
        others = self.estimates.batch.other_tokens
        shared = self._pass_ms(others) if others else 0.0
        return _count_expected(rates) - self.throughput * (self._verify_ms(len(rates)) - shared)

    def _verify_ms(self, drafted: int) -> float:
        """Time of the pass, with this many draft tokens of this request."""
        return self._pass_ms(self.estimates.batch.other_tokens + drafted + 1)

    def _pass_ms(self, tokens: int) -> float:
        known = self.estimates
        return (known.verify_latency if self.should_speculate else known.plain_latency).of(tokens)


def _best(values: Sequence[float]) -> int:
    """Where the largest value stands."""
    return values.index(max(values))


def _count_expected(rates: Sequence[float]) -> float:
    """Tokens that a chain with these acceptance rates is expected to bring."""
    tokens, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        tokens += reached
    return tokens
