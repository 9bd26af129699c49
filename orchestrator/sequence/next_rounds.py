"""The rounds that outcomes lead to: planned while the target is busy, or when one has come."""

from collections.abc import Sequence

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.fan_out import (
    acceptance_distribution,
    count_children,
    curves_of,
    outcome_chances,
)
from orchestrator.sequence.actions import Action, PrecomputeVerify
from orchestrator.sequence.draft import Draft
from orchestrator.sequence.free_run import FreeRun
from orchestrator.sequence.handover import Handover
from orchestrator.sequence.limits import RoundLimits
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.round import NextRound, Round
from protocol.messages import Origin, VerificationOutcome, Verify

_PLANNED = 8
"""Rounds that are planned beforehand."""


class NextRounds:
    """Plans the rounds of one sequence.

    Every `length` counts its tokens, the pending one of the round that is meant included.
    """

    def __init__(
        self, sequence: int, planner: Planner, limits: RoundLimits, free_run: FreeRun
    ) -> None:
        self._sequence, self._planner = sequence, planner
        self._limits, self._free_run = limits, free_run
        self.handover = Handover(planner)

    def plan(
        self, number: int, length: int, pending: int, draft: Draft, origin: Origin
    ) -> NextRound:
        """The round of this number, with as much of a draft as pays."""
        rows = self._limits.choose(draft, length, origin)
        chosen, planner = draft.pick(rows), self._planner
        speculates = planner.should_speculate and self._limits.can_speculate(length)
        granted = self._free_run.count_granted(number, length, len(chosen), speculates=speculates)
        verify = Verify(
            sequence=self._sequence,
            round=number,
            position=length - 1,
            nodes=[pending, *chosen.tokens],
            parents=chosen.sent_parents,
            distributions=chosen.drawn_from,
            granted=granted,
            stop_ids=sorted(self._limits.limits.stop_ids) if granted else [],
            drafter_idle=not speculates or planner.mode != "ssd",
        )
        return NextRound(chosen, draft, rows, verify)

    def find(self, current: Round, outcome: VerificationOutcome, length: int) -> NextRound | None:
        """The round that was prepared for this outcome; planned now, if its draft alone was."""
        planned = current.next_rounds.get((outcome.row, outcome.bonus))
        draft = current.cache.draft(outcome.row, outcome.bonus)
        if planned is not None or not draft or not self._limits.can_speculate(length):
            return planned
        return self.plan(outcome.round + 1, length, outcome.bonus, draft, "hit")

    def precompute(self, current: Round, number: int, length: int) -> list[Action]:
        """Plan the rounds that outcomes with a newly grown draft lead to, the likeliest ones.

        Args:
            current: the round in flight.
            number: its own.
            length: the same.
        """
        actions: list[Action] = []
        grown = [one for one in current.cache.latest_outcomes() if one[0] <= len(current.draft)]
        likeliest = choose_planned(self._planner.estimates, grown, current.draft, current.origin)
        for outcome in set(grown) - set(likeliest):
            current.next_rounds.pop(outcome, None)  # planned with less of its draft
        for row, bonus in likeliest:
            emitted = [*current.draft.tokens_to(row), bonus]
            after = length + len(emitted)
            ends = self._limits.cut(length, emitted)[1]
            if ends or not self._limits.can_speculate(after):
                continue
            draft = current.cache.draft(row, bonus)
            planned = self.plan(number + 1, after, bonus, draft, "hit")
            old = current.next_rounds.get((row, bonus))
            current.next_rounds[row, bonus] = planned
            if old is None or old.verify != planned.verify:
                actions.append(PrecomputeVerify(row, bonus, planned.verify))
        return actions + self.handover.update(current, number)


def choose_planned(
    known: CostModel, outcomes: Sequence[tuple[int, int]], draft: Draft, origin: Origin
) -> Sequence[tuple[int, int]]:
    """Of prepared outcomes, row and bonus, those whose rounds are worth planning beforehand.

    Each takes about 0.05 ms at every depth, and what the target says meanwhile waits for it.
    The others are planned if they come.
    """
    if len(outcomes) <= _PLANNED:
        return outcomes
    rates = known.acceptance_rates(draft.confidences, draft.parents, origin)
    ends = acceptance_distribution(rates, draft.parents)
    drafted = count_children(draft.parents)
    curves = curves_of(drafted, known.after_rejection[origin], known.after_all[origin])
    chances = outcome_chances([row for row, _ in outcomes], ends, curves)
    ranked = sorted(range(len(outcomes)), key=chances.__getitem__, reverse=True)
    return [outcomes[index] for index in ranked[:_PLANNED]]
