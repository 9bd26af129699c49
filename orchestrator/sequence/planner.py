"""The planner of each round: the modes `ar`, `sd` and `ssd` are one pipeline with different plans.

The value of a decision is its expected tokens, less those that the same time would yield at the
recent throughput (renewal reward): maximising tokens - throughput * time in each round maximises
the tokens per second of the whole. docs/planner.md explains every decision.
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
from protocol.messages import MAX_SIBLINGS, Mode, Origin

_BEYOND = 2
"""Depth of prepared branches in excess of the draft length recently worth verifying."""


class Preparation(NamedTuple):
    """Outcomes and depth for the drafter to prepare during a verification."""

    fan_out: list[int]
    depth: int
    held_back: int
    siblings: int = 0


@dataclass(frozen=True)
class Planner:
    """The options of a request, and the decisions that they leave open."""

    mode: Mode
    estimates: CostModel
    num_draft_tokens: int = 0
    """Draft tokens per round; 0: chosen each round by the drafter's confidences."""
    fixed_branches: int = 0
    """Branches prepared per round (B); 0: the default of the drafter's device."""
    sampled: bool = False
    """True if drafts are sampled (rejection rule): a token must not influence its own use."""
    max_draft_tokens: int = 0
    """Limit on the draft tokens per round; 0 is unlimited."""
    tree_nodes: int = 0
    """Most draft tokens of a verified tree; 0 and 1: chains."""

    # ------------------------------------------------------------ speculate or not

    @property
    def should_speculate(self) -> bool:
        """True if the next round is to be speculative.

        A fixed draft length is drafted whatever it costs, except for requests that share their
        passes with too many others.
        """
        switch = self.estimates.switch(self.mode)
        return switch is not None and (bool(self.num_draft_tokens) or switch.speculating)

    @property
    def looks_up(self) -> bool:
        """True if prompt lookups may be verified, with drafts or alone."""
        return self.should_speculate or (self.mode != "ar" and self.estimates.streams == 1)

    @property
    def is_in_turn(self) -> bool:
        """True if drafter and target take turns, each waiting for the other."""
        by_choice = self.estimates.drafts_in_turn and not self.num_draft_tokens
        return self.mode == "sd" or by_choice

    @property
    def prepares(self) -> bool:
        """True if the drafter prepares for outcomes during a speculative round."""
        return self.mode == "ssd" and not self.is_in_turn

    def report_plain(self, now: float) -> tuple[float, float]:
        """Return plain decoding's measured tok/s, and the age in seconds; 0 if there is none."""
        switch = self.estimates.switch(self.mode)
        if switch is None or switch.measured_at is None:
            return 0.0, 0.0
        return switch.plain_tok_s, max(0.0, now - switch.measured_at)

    # ------------------------------------------------------------ how long

    @property
    def is_chain_only(self) -> bool:
        """True if only chains are verified: the default unless a tree size is set.

        The rejection rule is proved for chains only.
        """
        return self.sampled or self.tree_nodes < 2

    def choose_nodes(self, draft: Draft, origin: Origin, *, takes_trees: bool = True) -> list[int]:
        """Return the rows of a draft to verify: as many as are worth their time.

        The most likely path comes first, so that every prefix of the result is a tree, too.
        `takes_trees` is True if the verifier supports trees.
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
        """Return a draft length; whether it includes a token depends on those before it alone.

        Each rate belongs to the distribution of a token, and so depends on the tokens before it. A
        token is used if going on pays, assuming that all later tokens have the same rate.
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
        """Return the rows worth verifying of a lookup; `alone`: no drafter works meanwhile."""
        rows, chances = self.rank(lookup, "lookup")
        if self.num_draft_tokens:
            return rows  # `choose_nodes` keeps as many
        chain = len(rows) if not self.is_chain_only else count_chain(rows, lookup.parents)
        count = find_best(self.value_nodes(chances, alone=alone)[: chain + 1])
        return rows[: len(rows) if count and not self.is_chain_only else count]

    # ------------------------------------------------------------ wait or not

    def backup_length(self, lookup: Draft | None = None) -> int:
        """Return how many tokens to draft while the target waits, if no draft is prepared.

        With 0 the target does not wait: it verifies a prompt lookup, if that pays, or the bonus
        token alone (plain decoding of one token), while the drafter prepares the next round.
        """
        if self.num_draft_tokens:
            return self.num_draft_tokens
        if self.is_in_turn and not self.estimates.draft_token_ms:
            return self.depth  # nothing was drafted yet
        if self.estimates.streams > 1 and not self.is_in_turn:
            return 0  # the other request's pass would start without this one
        values = self.value_of_waiting([])
        count = find_best(values)
        instead = self.value_nodes(self.rank(lookup or Draft(), "lookup")[1])
        if values[count] <= max(instead):
            return 0
        return self._longest_wait if self.is_in_turn else count

    def should_extend(self, draft: Draft) -> bool:
        """Return True if the target should wait for one more token of an awaited draft.

        This depends on the tokens drafted so far, which are verified, not on those to come.
        """
        if self.num_draft_tokens:
            return True
        calibration = self.estimates.calibrations["miss"]
        rates = [calibration.rate(draft.confidences[row - 1]) for row in draft.main]
        return find_best(self.value_of_waiting(rates)) > 0

    def value_of_waiting(self, rates: Sequence[float]) -> list[float]:
        """Return the value of waiting for 0, 1, ... tokens after those with these rates."""
        estimates, throughput = self.estimates, self.throughput
        rate, token_ms = estimates.backup_rate, estimates.draft_token_ms
        first_ms = 0.0 if rates else estimates.wait_overhead_ms
        more = max(0, self._longest_wait - len(rates)) if token_ms else 0
        values = self.value_nodes(list(accumulate([*rates, *[rate] * more], mul)))
        return [
            value - throughput * (count * token_ms + (first_ms if count else 0.0))
            for count, value in enumerate(values[len(rates) :])
        ]

    @property
    def _longest_wait(self) -> int:
        """Most tokens to draft while the target waits: what they may cost is within the credit."""
        switch, latency = self.estimates.switch(self.mode), self._latency
        if switch is None or self.num_draft_tokens:
            return self.depth
        depth, draft_ms, risk_ms = self.depth, self.estimates.draft_token_ms, switch.risk_ms
        start_ms, *times_ms = latency.of_up_to(self._rows(0), self._rows(depth))
        for count, time_ms in enumerate(times_ms, start=1):
            if count > self.is_in_turn and count * draft_ms + time_ms - start_ms > risk_ms:
                return count - 1
        return depth

    def value_of_stopping(self, lookup: Draft) -> float:
        """Return the value of ending a free run for a lookup.

        The target is already computing the token at the lookup's first position. So only those
        after it can be verified, and only if the first one is right; otherwise plain decoding
        starts again. In any case the target waits a while.
        """
        estimates, chain = self.estimates, lookup.pick(lookup.main)
        rates = estimates.acceptance_rates(chain.confidences, chain.parents, "lookup")
        if not rates:
            return 0.0
        right, behind = rates[0], self.value_nodes(list(accumulate(rates[1:], mul)), alone=True)
        wait_ms = estimates.idle_ms["lookup"].value
        start_ms = max(wait_ms, estimates.run_start_ms.value)
        lost_ms = right * wait_ms + (1.0 - right) * start_ms
        return right * (max(behind) - behind[0]) - lost_ms / estimates.plain_latency.of(1)

    # ------------------------------------------------------------ how wide

    @property
    def depth(self) -> int:
        """Depth of prepared branches, and the longest draft that is verified."""
        usual = ceil(self.estimates.draft_length) + _BEYOND
        return self.num_draft_tokens or min(self.max_draft_tokens or LONGEST_DRAFT, usual)

    @property
    def branches(self) -> int:
        """B, the branches prepared per round: the drafter processes all of them during a pass."""
        return self.fixed_branches or self.estimates.branches // self.estimates.streams

    @property
    def held_back(self) -> int:
        """For Saguaro sampling: expected branches of a row (F), at least one."""
        return max(1, self.branches // (self.depth + 1))

    @property
    def siblings(self) -> int:
        """Number of alternatives to request from a drafter for each token; 0: chains."""
        return 0 if self.is_chain_only else min(MAX_SIBLINGS, self.tree_nodes - 1)

    def plan_preparation(self, draft: Draft, origin: Origin) -> Preparation:
        """Decide what to prepare during the verification of this draft."""
        estimates, depth = self.estimates, self.depth
        if not self.num_draft_tokens and estimates.streams == 1 and estimates.step_latency.step_ms:
            # No deeper than the drafter gets during the verification: it learns of a miss only
            # between two depths, and while it is idle its core can help the target.
            time_ms = estimates.verify_latency.of(1 + len(draft)) + estimates.idle_ms["hit"].value
            depth = max(1, min(depth, estimates.step_latency.depths_in(time_ms)))
        return Preparation(self.fan_out(draft, origin), depth, self.held_back)

    def fan_out(self, draft: Draft, origin: Origin) -> list[int]:
        """Return F_0..F_K, the outcomes to prepare after each row of a draft."""
        estimates = self.estimates
        rates = estimates.acceptance_rates(draft.confidences, draft.parents, origin)
        chances = acceptance_distribution(rates, draft.parents)
        curves = choose_curves(
            draft.parents, estimates.after_rejection[origin], estimates.after_all[origin]
        )
        return allocate(chances, self.branches, curves)

    # ------------------------------------------------------------ values

    @property
    def throughput(self) -> float:
        """Recent tokens per millisecond of all requests; at first, plain decoding's."""
        estimates = self.estimates
        switch = estimates.switch(self.mode)
        measured = switch.speculative_tok_s / 1e3 if switch is not None else 0.0
        alone = 1.0 / estimates.verify_latency.of(estimates.streams)
        return estimates.streams * (measured or alone)

    def rank(self, draft: Draft, origin: Origin) -> tuple[list[int], list[float]]:
        """Return its rows, the most likely path first, and the probabilities of their paths."""
        parents = draft.parents
        return rank_nodes(
            parents, self.estimates.acceptance_rates(draft.confidences, parents, origin)
        )

    def value_nodes(self, chances: Sequence[float], *, alone: bool = False) -> list[float]:
        """Return the value of verifying the first 0, 1, ... of some nodes, in tokens.

        That is one token, plus each node's path probability, less the tokens T_v would yield.

        Args:
            chances: probabilities of the nodes' paths.
            alone: no drafter works; the throughput is that of all recent rounds.
        """
        estimates = self.estimates
        throughput = self.throughput
        if alone:
            plain = 1.0 / estimates.plain_latency.of(estimates.streams)
            throughput = estimates.streams * max(plain, estimates.recent.value)
        latency = estimates.plain_latency if alone else self._latency
        times_ms = latency.of_up_to(self._rows(0), self._rows(len(chances)))
        tokens = accumulate(chances, initial=1.0)
        return [
            gained - throughput * time_ms for gained, time_ms in zip(tokens, times_ms, strict=True)
        ]

    def _value_of_chain(self, rates: Sequence[float]) -> float:
        return self.value_nodes(list(accumulate(rates, mul)))[-1]

    def _rows(self, drafted: int) -> int:
        """Return the rows of a pass with these draft tokens; others add at least a row each."""
        return self.estimates.streams + drafted

    @property
    def _latency(self) -> VerifyLatency:
        contended = self.should_speculate and self.prepares
        return self.estimates.verify_latency if contended else self.estimates.plain_latency
