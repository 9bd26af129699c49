"""Decides each round: the modes `ar`, `sd` and `ssd` are one pipeline with different plans.

A decision is worth its expected tokens, less what its time could have brought at the recent
throughput (renewal reward): maximising tokens - throughput * time in each round maximises the
tokens per second of the whole. docs/planner.md explains every decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from operator import mul
from typing import NamedTuple

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.fan_out import acceptance_distribution, allocate, choose_curves
from orchestrator.learning.latency import VerifyLatency
from orchestrator.learning.round_observation import LONGEST_DRAFT
from orchestrator.sequence.draft import Draft
from orchestrator.sequence.tree_choice import count_chain, find_best, rank_nodes
from protocol.messages import Mode, Origin

MOST_SIBLINGS = 4
"""Runners-up that are asked for beside a draft token: later ones are hardly ever right."""
_BEYOND = 2
"""How much deeper branches are prepared than drafts were worth verifying recently."""
_WORTH_A_TRIAL = 16
"""Tokens that must be to come where it is tried again whether drafts pay."""


class Prediction(NamedTuple):
    """What a round is expected to bring."""

    tokens: float
    milliseconds: float


class MeasuredSpeed(NamedTuple):
    """A speed, and how long ago it was measured."""

    tok_s: float
    age_s: float


class Preparation(NamedTuple):
    """What the drafter is asked to prepare beside a verification."""

    fan_out: list[int]
    depth: int
    held_back: int
    siblings: int = 0


@dataclass(frozen=True)
class Planner:
    """The knobs of a request, and the decisions they leave open."""

    mode: Mode
    estimates: CostModel
    num_draft_tokens: int = 0
    """Draft tokens per round; 0 decides each round by the drafter's confidences."""
    fixed_branches: int = 0
    """Branches prepared per round (B); 0: as many as the drafter's device is good for."""
    sampled: bool = False
    """Drafts are drawn at random (rejection rule): what was drawn must not decide its use."""
    max_draft_tokens: int = 0
    """Most draft tokens per round that may be decided; 0 is any number."""
    tree_nodes: int = 0
    """Draft tokens of the trees that are verified; 0 and 1: chains."""

    # ------------------------------------------------------------ speculate or not

    @property
    def should_speculate(self) -> bool:
        """Whether the next round is to be speculative.

        A draft length that is fixed by hand is drafted whatever it costs, but for requests that
        share their passes with too many others.
        """
        switch = self.estimates.switch(self.mode)
        return switch is not None and (bool(self.num_draft_tokens) or switch.speculating)

    @property
    def looks_up(self) -> bool:
        """Whether prompt lookups may be verified: with drafts, or alone where those do not pay."""
        switch = self.estimates.switch(self.mode)
        alone = switch is not None and switch.is_paused and self.estimates.streams == 1
        return self.should_speculate or alone

    @property
    def is_in_turn(self) -> bool:
        """Whether the drafter rests while the target verifies, and is waited for."""
        by_choice = self.estimates.drafts_in_turn and not self.num_draft_tokens
        return self.mode == "sd" or by_choice

    @property
    def prepares(self) -> bool:
        """Whether the drafter prepares for outcomes beside a speculative round."""
        return self.mode == "ssd" and not self.is_in_turn

    @property
    def least_ahead(self) -> int:
        """How many tokens an answer must have ahead to begin with drafts, or to go on with them.

        What another trial costs is not earned back at the end of an answer: the next one has it.
        """
        switch = self.estimates.switch(self.mode)
        due = switch is not None and switch.is_trial_due and not self.num_draft_tokens
        return _WORTH_A_TRIAL if due else 1

    def report_plain(self, now: float) -> MeasuredSpeed:
        """Return the measured speed of plain decoding; 0 if there is none."""
        switch = self.estimates.switch(self.mode)
        if switch is None or switch.measured_at is None:
            return MeasuredSpeed(0.0, 0.0)
        return MeasuredSpeed(switch.plain_tok_s, max(0.0, now - switch.measured_at))

    # ------------------------------------------------------------ how long

    @property
    def is_chain_only(self) -> bool:
        """Whether chains are verified: unless a size of trees is fixed by hand.

        The rejection rule is proved for chains.
        """
        return self.sampled or self.tree_nodes < 2

    def choose_nodes(self, draft: Draft, origin: Origin, *, takes_trees: bool = True) -> list[int]:
        """Return the rows of a draft to verify: as many as are worth their time.

        The likeliest path comes first, so that the beginning of what is returned is a tree, too.
        `takes_trees` says whether the verifier does.
        """
        if not (self.is_chain_only or not takes_trees):
            rows, depths = self.rank(draft, origin)[0], draft.depths
            deepest = self.num_draft_tokens or len(rows)
            return [row for row in rows if depths[row] <= deepest][: self.tree_nodes]
        main = draft.main
        if self.num_draft_tokens or origin == "lookup":  # `choose_lookup` has decided
            return main[: self.num_draft_tokens or None]
        calibration = self.estimates.calibrations[origin]
        most = self.max_draft_tokens or None
        rates = [calibration.rate(draft.confidences[row - 1]) for row in main[:most]]
        if self.sampled:
            return main[: self._length_if_sampled(rates)]
        return main[: find_best(self.value_nodes(list(accumulate(rates, mul))))]

    def _length_if_sampled(self, rates: Sequence[float]) -> int:
        """Return the length where neither a token nor what follows it influences its own use.

        Each rate belongs to the distribution of a token, and so depends on the tokens before
        it. A token is used if going on pays, supposing that all that follow are as sure.
        """
        for count, rate in enumerate(rates):
            used = list(rates[:count])
            ahead = range(1, len(rates) - count + 1)
            if max(self._value_of_chain(used + [rate] * more) for more in ahead) <= (
                self._value_of_chain(used)
            ):
                return count
        return len(rates)

    def choose_lookup(self, lookup: Draft, *, alone: bool = False) -> list[int]:
        """Return the rows of a lookup worth verifying; `alone`: no drafter works meanwhile."""
        rows, chances = self.rank(lookup, "lookup")
        if self.num_draft_tokens:
            return rows  # `choose_nodes` keeps as many
        chain = len(rows) if not self.is_chain_only else count_chain(rows, lookup.parents)
        count = find_best(self.value_nodes(chances, alone=alone)[: chain + 1])
        return rows[: len(rows) if count and not self.is_chain_only else count]

    # ------------------------------------------------------------ wait or not

    def backup_length(self, lookup: Draft | None = None) -> int:
        """Return how many tokens to draft while the target waits, where no draft is prepared.

        With 0 the target does not wait: it verifies a prompt lookup, if that pays, or the
        bonus token alone, plain decoding of one token, while the drafter prepares the next
        round.
        """
        if self.num_draft_tokens:
            return self.num_draft_tokens
        if self.is_in_turn and not self.estimates.draft_token_ms:
            return self.depth  # nothing was drafted yet
        if self.estimates.streams > 1 and not self.is_in_turn:
            return 0  # the pass of the other request would leave without this one
        values = self.value_of_waiting([])
        count = find_best(values)
        instead = self.value_nodes(self.rank(lookup or Draft(), "lookup")[1])
        if values[count] <= max(instead):
            return 0
        return self.depth if self.is_in_turn else count

    def should_extend(self, draft: Draft) -> bool:
        """Whether the target should wait for another token behind those that it waited for.

        It depends on what is drafted already, and is verified, not on what would come.
        """
        if self.num_draft_tokens:
            return True
        calibration = self.estimates.calibrations["miss"]
        rates = [calibration.rate(draft.confidences[row - 1]) for row in draft.main]
        return find_best(self.value_of_waiting(rates)) > 0

    def value_of_waiting(self, rates: Sequence[float]) -> list[float]:
        """Return what waiting for 0, 1, ... tokens behind those with these rates is worth."""
        known = self.estimates
        rate, token_ms = known.backup_rate, known.draft_token_ms
        if not token_ms:
            return [self._value_of_chain(rates)]
        first_ms = 0.0 if rates else known.wait_overhead_ms
        return [
            self._value_of_chain([*rates, *[rate] * count])
            - self.throughput * (count * token_ms + (first_ms if count else 0.0))
            for count in range(max(0, self.depth - len(rates)) + 1)
        ]

    def value_of_stopping(self, lookup: Draft) -> float:
        """Return what it is worth to end a free run for a lookup.

        Its first token is being computed, so that only what follows it can be verified, and only
        if it is right. Otherwise plain decoding begins anew; in any case the target waits a while.
        """
        known, chain = self.estimates, lookup.pick(lookup.main)
        rates = known.acceptance_rates(chain.confidences, chain.parents, "lookup")
        if not rates:
            return 0.0
        right, behind = rates[0], self.value_nodes(list(accumulate(rates[1:], mul)), alone=True)
        wait_ms = known.idle_ms["lookup"].value
        start_ms = max(wait_ms, known.run_start_ms.value)
        lost_ms = right * wait_ms + (1.0 - right) * start_ms
        return right * (max(behind) - behind[0]) - lost_ms / known.plain_latency.of(1)

    # ------------------------------------------------------------ how wide

    @property
    def depth(self) -> int:
        """How deep branches are prepared, and the longest draft that is verified."""
        usual = ceil(self.estimates.draft_length) + _BEYOND
        return self.num_draft_tokens or min(self.max_draft_tokens or LONGEST_DRAFT, usual)

    @property
    def branches(self) -> int:
        """B, the branches prepared per round: the drafter works for all in the time of a pass."""
        return self.fixed_branches or self.estimates.branches // self.estimates.streams

    @property
    def held_back(self) -> int:
        """For Saguaro sampling: branches that a row can expect (F), at least one."""
        return max(1, self.branches // (self.depth + 1))

    @property
    def siblings(self) -> int:
        """How many runners-up to ask a drafter for beside each token; 0: chains."""
        return 0 if self.is_chain_only else min(MOST_SIBLINGS, self.tree_nodes - 1)

    def plan_preparation(self, draft: Draft, origin: Origin) -> Preparation:
        """Decide what to prepare beside a verification of this draft."""
        known, depth = self.estimates, self.depth
        if not self.num_draft_tokens and known.streams == 1 and known.step_latency.is_known:
            # A drafter hears of a miss between two depths only, and the core of one that is done
            # can help the target: no deeper than gets done meanwhile.
            time_ms = known.verify_latency.of(1 + len(draft)) + known.idle_ms["hit"].value
            depth = max(1, min(depth, int(known.step_latency.depths_in(time_ms))))
        return Preparation(self.fan_out(draft, origin), depth, self.held_back)

    def fan_out(self, draft: Draft, origin: Origin) -> list[int]:
        """Return F_0..F_K, the outcomes to prepare behind each row of a draft."""
        known = self.estimates
        rates = known.acceptance_rates(draft.confidences, draft.parents, origin)
        chances = acceptance_distribution(rates, draft.parents)
        curves = choose_curves(
            draft.parents, known.after_rejection[origin], known.after_all[origin]
        )
        return allocate(chances, self.branches, curves)

    # ------------------------------------------------------------ what that is worth

    def predict(self, draft: Draft, origin: Origin) -> Prediction:
        """Return what verifying this draft is expected to bring."""
        *_, tokens = accumulate(self.rank(draft, origin)[1], initial=1.0)
        waiting = self.estimates.idle_ms[origin].value
        return Prediction(tokens, self._latency.of(self._rows(len(draft))) + waiting)

    @property
    def throughput(self) -> float:
        """Recent tokens per millisecond of all requests; at first, plain decoding's."""
        known = self.estimates
        switch = known.switch(self.mode)
        measured = switch.speculative_tok_s / 1e3 if switch is not None else 0.0
        return known.streams * (measured or 1.0 / known.verify_latency.of(known.streams))

    def rank(self, draft: Draft, origin: Origin) -> tuple[list[int], list[float]]:
        """Return its rows, the likeliest path first, and the chances of their paths."""
        parents = draft.parents
        return rank_nodes(
            parents, self.estimates.acceptance_rates(draft.confidences, parents, origin)
        )

    def value_nodes(self, chances: Sequence[float], *, alone: bool = False) -> list[float]:
        """Return what verifying the first 0, 1, ... of some nodes is worth, in tokens.

        That is one token, and of every node the chance of its path, less T_v.

        Args:
            chances: of the nodes' paths.
            alone: no drafter works, so that plain decoding is what the time could have brought.
        """
        known = self.estimates
        plain_ms = known.plain_latency.of(known.streams)
        throughput = known.streams / plain_ms if alone else self.throughput
        latency = known.plain_latency if alone else self._latency
        return [
            tokens - throughput * latency.of(self._rows(count))
            for count, tokens in enumerate(accumulate(chances, initial=1.0))
        ]

    def _value_of_chain(self, rates: Sequence[float]) -> float:
        tokens = float(sum(accumulate(rates, mul, initial=1.0)))
        return tokens - self.throughput * self._latency.of(self._rows(len(rates)))

    def _rows(self, drafted: int) -> int:
        """Return the rows of a pass with so many draft tokens: others add at least one each."""
        return self.estimates.streams + drafted

    @property
    def _latency(self) -> VerifyLatency:
        beside = self.should_speculate and self.prepares
        return self.estimates.verify_latency if beside else self.estimates.plain_latency
