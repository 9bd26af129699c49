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

from orchestrator.learning.cost_model import BRANCHES_ON_A_GPU, MOST_SIBLINGS, CostModel
from orchestrator.learning.fan_out import (
    acceptance_distribution,
    allocate,
    count_children,
)
from orchestrator.learning.latency import VerifyLatency
from orchestrator.learning.round_observation import LONGEST_DRAFT
from orchestrator.sequence.draft import Draft
from orchestrator.sequence.tree_choice import (
    RankedNodes,
    count_chain,
    count_siblings,
    find_best,
    rank_nodes,
)
from protocol.messages import Mode, Origin

_BEYOND = 2
"""How much deeper branches are prepared than drafts were worth verifying recently."""
_LEAST_BRANCHES = 2
_WORTH_A_TRIAL = 16
"""Tokens that must be to come where it is tried again whether drafts pay."""
_GROWN_BY_HAND = 8
"""Runners-up that grow on where the size of trees is fixed."""


class Prediction(NamedTuple):
    """What a round is expected to bring."""

    tokens: float
    milliseconds: float


class MeasuredSpeed(NamedTuple):
    """A speed, and how long ago it was measured."""

    tok_s: float
    age_s: float


@dataclass(frozen=True)
class Planner:
    """The knobs of a request, and the decisions they leave open."""

    mode: Mode
    estimates: CostModel
    num_draft_tokens: int = 0
    """Draft tokens per round; 0 decides each round by the drafter's confidences."""
    fixed_branches: int = 0
    """Branches prepared per round (B); 0 follows what wider and deeper trees would gain."""
    sampled: bool = False
    """Drafts are drawn at random (rejection rule): what was drawn must not decide its use."""
    max_draft_tokens: int = 0
    """Most draft tokens per round that may be decided; 0 is any number."""
    tree_nodes: int | None = None
    """Draft tokens of the trees that are verified; 0 and 1: chains only; None: what pays."""
    verify_ahead: bool | None = None
    """Whether the verifier begins prepared rounds unasked; None: if that pays."""

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
    def least_ahead(self) -> int:
        """How many tokens an answer must have ahead to begin with drafts, or to go on with them.

        What another trial costs is not earned back at the end of an answer: the next one has it.
        """
        switch = self.estimates.switch(self.mode)
        due = switch is not None and switch.is_trial_due and not self.num_draft_tokens
        return _WORTH_A_TRIAL if due and self.estimates.batch.streams == 1 else 1

    def report_plain(self, now: float) -> MeasuredSpeed:
        """Speed of plain decoding, if it was measured in this run and still holds; else 0."""
        switch = self.estimates.switch(self.mode)
        tok_s = switch.report_plain_tok_s(now) if switch is not None else 0.0
        if switch is None or not tok_s:
            return MeasuredSpeed(0.0, 0.0)
        age_s = switch.freshness.age_s(now) or 0.0
        return MeasuredSpeed(tok_s / self.estimates.batch.scale, age_s)

    # ------------------------------------------------------------ what to verify

    @property
    def is_chain_only(self) -> bool:
        """Whether chains are verified whatever trees would bring.

        The rejection rule is proved for chains; a draft length fixed by hand means a chain.
        """
        if self.sampled or self.tree_nodes is None:
            return self.sampled or self.num_draft_tokens > 0
        return self.tree_nodes < 2

    def choose_nodes(self, draft: Draft, origin: Origin, *, takes_trees: bool = True) -> list[int]:
        """The rows of a draft to verify: as many as are worth their time.

        The likeliest path comes first, so that the beginning of what is returned is a tree, too.
        `takes_trees` says whether the verifier does.
        """
        if self.is_chain_only or not takes_trees:
            return self._choose_chain(draft, origin)
        rows, chances = self.rank(draft, origin)
        if self.tree_nodes:
            deepest, depths = self.num_draft_tokens or len(rows), draft.depths
            return [row for row in rows if depths[row] <= deepest][: self.tree_nodes]
        if origin == "lookup":
            return rows  # `choose_lookup` has decided
        chances = chances[: self.max_draft_tokens or None]
        chain = count_chain(rows, draft.parents)
        return rows[: find_best(self.value_nodes(chances, chain), chain)]

    def _choose_chain(self, draft: Draft, origin: Origin) -> list[int]:
        main = draft.main
        if self.num_draft_tokens or origin == "lookup":  # `choose_lookup` has decided
            return main[: self.num_draft_tokens or None]
        first = self.estimates.calibrations[origin]
        most = self.max_draft_tokens or None
        rates = [first.rate(draft.confidences[row - 1]) for row in main[:most]]
        if self.sampled:
            return main[: self._length_if_sampled(rates)]
        return main[: find_best(self.value_nodes(list(accumulate(rates, mul))))]

    def _length_if_sampled(self, rates: Sequence[float]) -> int:
        """The length where neither a token nor what follows it influences its own use.

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

    @property
    def siblings(self) -> int:
        """How many runners-up to ask a drafter for beside each token; 0 if chains are faster."""
        pay = self.tree_nodes or self.estimates.asks_for_trees(self.mode)
        return self.affordable_siblings if pay else 0

    @property
    def chooses_trees(self) -> bool:
        """Whether it is the planner's choice to ask a drafter for trees or for chains."""
        return self.tree_nodes is None and self.affordable_siblings > 0

    @property
    def affordable_siblings(self) -> int:
        """How many runners-up beside a draft token are worth their rows; even unless by hand.

        None where a row costs a good part of a pass.
        """
        if self.is_chain_only:
            return 0
        if self.tree_nodes:
            return min(MOST_SIBLINGS, self.tree_nodes - 1)
        known = self.estimates
        if not known.verify_latency.has_cheap_rows:
            return 0
        length = ceil(known.draft_length)
        rows_ms = self._verify_ms(length + MOST_SIBLINGS, tree=True)
        rows_ms -= self._verify_ms(length, tree=True)
        curve = known.after_rejection["hit"]
        hits = [curve.hit(count) for count in range(MOST_SIBLINGS + 1)]
        row_cost = self.throughput * max(0.0, rows_ms) / MOST_SIBLINGS
        count = count_siblings(known.acceptance["hit"].value, hits, row_cost)
        return count + count % 2  # few numbers recur: each is compiled on a GPU

    @property
    def grown_siblings(self) -> int:
        """How many runners-up of all branches are continued at each depth; 0: they are leaves.

        Each makes a depth longer for the drafter, so that trees are shallower in the same time.
        """
        if not self.siblings:
            return 0
        # By hand, a tree has no room for more runners-up than nodes.
        if self.tree_nodes:
            return min(_GROWN_BY_HAND, self.tree_nodes // 2)
        grown = self.estimates.tree_growth.grown // self.estimates.batch.streams
        return min(grown, max(0, BRANCHES_ON_A_GPU - self.branches))  # the rows of the widest tree

    # ------------------------------------------------------------ what to wait for

    def backup_length(self, lookup: Draft | None = None) -> int:
        """After a miss, how many tokens to draft while the target waits.

        With 0 the target does not wait: it verifies a prompt lookup, if that pays, or the
        bonus token alone, plain decoding of one token, while the drafter prepares the next
        round.

        Args:
            lookup: what the prompt lookup found, if anything.
        """
        if self.num_draft_tokens:
            return self.num_draft_tokens
        if self.estimates.batch.other_tokens:
            return 0  # the pass of the others would leave without this request
        values = self.value_of_waiting([])
        count = find_best(values)
        found = lookup or Draft()
        rows, chances = self.rank(found, "lookup")
        instead = self.value_nodes(chances, count_chain(rows, found.parents))
        return count if values[count] > max(instead) else 0

    @property
    def sequential_length(self) -> int:
        """Most tokens to draft between two verifications (mode `sd`)."""
        unmeasured = not self.estimates.draft_token_ms
        pays = self.num_draft_tokens or unmeasured or find_best(self.value_of_waiting([]))
        return self.depth if pays else 0

    def should_extend(self, draft: Draft) -> bool:
        """Whether the target should wait for another token behind those of a backup.

        It depends on what is drafted already, and is verified, not on what would come.
        """
        if self.num_draft_tokens:
            return True
        first = self.estimates.calibrations["miss"]
        rates = [first.rate(draft.confidences[row - 1]) for row in draft.main]
        return find_best(self.value_of_waiting(rates)) > 0

    def value_of_waiting(self, rates: Sequence[float]) -> list[float]:
        """What waiting for 0, 1, ... tokens behind those with these rates is worth, in tokens."""
        known = self.estimates
        rate, token_ms = known.backup_rate, known.draft_token_ms
        if not token_ms:
            return [self._value_of_chain(rates)]  # nothing was drafted yet
        throughput = self.throughput / known.batch.streams  # the target works for the others
        first_ms = 0.0 if rates else known.wait_overhead_ms
        return [
            self._value_of_chain([*rates, *[rate] * count])
            - throughput * (count * token_ms + (first_ms if count else 0.0))
            for count in range(max(0, self.depth - len(rates)) + 1)
        ]

    # ------------------------------------------------------------ what to prepare

    @property
    def depth(self) -> int:
        """How deep branches are prepared, and the longest draft that is verified."""
        usual = ceil(self.estimates.draft_length) + _BEYOND
        return self.num_draft_tokens or min(self.longest_draft, usual)

    @property
    def longest_draft(self) -> int:
        """The longest draft that may be decided on, whatever pays now."""
        return self.num_draft_tokens or self.max_draft_tokens or LONGEST_DRAFT

    @property
    def branches(self) -> int:
        """B, the branches prepared per round."""
        # The drafter works for all requests in the time of one pass.
        share = self.estimates.branches // self.estimates.batch.streams
        return self.fixed_branches or max(_LEAST_BRANCHES, share)

    @property
    def held_back(self) -> int:
        """For Saguaro sampling: branches that a row can expect (F), at least one."""
        return max(1, self.branches // (self.depth + 1))

    def fan_out(self, draft: Draft, origin: Origin) -> list[int]:
        """F_0..F_K, the outcomes to prepare behind each row of a draft that is verified."""
        return allocate(
            acceptance_distribution(self.acceptance_rates(draft, origin), draft.parents),
            self.branches,
            self.estimates.after_rejection[origin],
            self.estimates.after_all[origin],
            count_children(draft.parents),
        )

    # ------------------------------------------------------------ what that is worth

    def predict(self, draft: Draft, origin: Origin) -> Prediction:
        """What verifying this draft brings."""
        chances = self.rank(draft, origin).chances
        waiting = self.estimates.idle_ms[origin].value
        *_, tokens = accumulate(chances, initial=1.0)
        verify_ms = self._verify_ms(len(draft), tree=not draft.is_chain)
        return Prediction(tokens, verify_ms + waiting)

    @property
    def throughput(self) -> float:
        """Recent tokens per millisecond of all requests; at first, plain decoding's."""
        switch, batch = self.estimates.switch(self.mode), self.estimates.batch
        known = switch.speculative_tok_s if switch is not None else 0.0
        measured = batch.scale * known / 1e3
        return measured or batch.streams / self.estimates.verify_latency.of(batch.streams)

    def acceptance_rates(self, draft: Draft, origin: Origin) -> list[float]:
        """Of each draft token, given that its parent is accepted."""
        return self.estimates.acceptance_rates(draft.confidences, draft.parents, origin)

    def rank(self, draft: Draft, origin: Origin) -> RankedNodes:
        """Its nodes, the likeliest path first."""
        return rank_nodes(draft.parents, self.acceptance_rates(draft, origin))

    def value_nodes(self, chances: Sequence[float], chain: int | None = None) -> list[float]:
        """What verifying the first 0, 1, ... of some nodes is worth, by their paths' chances.

        That is one token, and of every node its chance, less T_v(m + 1), or what it adds to a pass.
        The first `chain` of them are a chain, and with one more they are not; None: all are.
        """
        longest = len(chances) if chain is None else chain
        first = self.estimates.batch.other_tokens + 1
        throughput, others_ms = self.throughput, self._others_ms
        chains, trees = self._latency(tree=False), self._latency(tree=True)
        later_ms, values = self.estimates.behind_trees.milliseconds, list[float]()
        for count, tokens in enumerate(accumulate(chances, initial=1.0)):
            fork = count > longest
            verify_ms = trees.of(first + count) + later_ms if fork else chains.of(first + count)
            values.append(tokens - throughput * (verify_ms - others_ms))
        return values

    def _value_of_chain(self, rates: Sequence[float]) -> float:
        added_ms = self._verify_ms(len(rates)) - self._others_ms
        return float(sum(accumulate(rates, mul, initial=1.0))) - self.throughput * added_ms

    @property
    def _others_ms(self) -> float:
        """Time of the pass that there would be without this request; 0 if there is none."""
        others = self.estimates.batch.other_tokens
        return self._latency(tree=False).of(others) if others else 0.0

    def _verify_ms(self, drafted: int, *, tree: bool = False) -> float:
        """Time of the pass, with this many draft tokens of this request."""
        return self._latency(tree=tree).of(self.estimates.batch.other_tokens + drafted + 1)

    def _latency(self, *, tree: bool) -> VerifyLatency:
        return self.estimates.latency(speculating=self.should_speculate, tree=tree)
