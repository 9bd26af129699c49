"""What the verifier may begin without being asked: rounds that are prepared for outcomes.

After a hit it is known what is verified next, before the outcome is. A verifier that knows it
too begins when the outcome is there and says so; the way to the orchestrator and back takes
no time then. What it begins is the message that it would be sent, so no token depends on it.
"""

from orchestrator.sequence.actions import Action, HandOver
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.round import NextRound, Round
from protocol.messages import VerificationOutcome

MOST_NODES = 4096
"""Tokens of all that is handed over in one round, what became longer counted again."""


class Handover:
    """For the rounds of one sequence; what was handed over stands in `Round.handed`."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    @property
    def pays(self) -> bool:
        """Whether to hand anything over now.

        Not while plain decoding is measured or drafts do not pay. Under the rejection rule never:
        each draft token has its distribution with it, and all of them would be sent for the one
        outcome that comes.
        """
        planner = self._planner
        if not planner.prepares or planner.sampled or not planner.should_speculate:
            return False
        if planner.verify_ahead is not None:
            return planner.verify_ahead
        known = planner.estimates
        return known.streams == 1 and known.handover.pays

    def update(self, current: Round, number: int) -> list[Action]:
        """Hand over what has been planned, and take back what is planned no more.

        Args:
            current: the round in flight.
            number: its own.
        """
        pays = self.pays
        if not (pays or current.on_offer):
            return []
        wanted = current.next_rounds if pays else {}
        changes = {key: 0 for key in current.on_offer if key not in wanted}
        for key, planned in wanted.items():
            offered = current.on_offer.get(key, 0)
            if offered and current.handed[offered - 1].verify == planned.verify:
                current.handed[offered - 1] = planned  # more is known of what it leaves out
                continue
            if (found := self._add(current, planned)) or offered:
                changes[key] = found
        for key, found in changes.items():
            current.on_offer.pop(key, None)
            if found:
                current.on_offer[key] = found
        return [HandOver(number, changes)] if changes else []

    def _add(self, current: Round, planned: NextRound) -> int:
        """The number of what is handed over now; 0 if there was too much already."""
        nodes = len(planned.verify.nodes)
        if planned.verify.granted or current.handed_nodes + nodes > MOST_NODES:
            return 0
        current.handed_nodes += nodes
        current.handed.append(planned)
        return len(current.handed)

    @staticmethod
    def find_begun(current: Round, outcome: VerificationOutcome) -> NextRound | None:
        """The round that has begun with this outcome; None if it was never handed over."""
        if not outcome.began <= len(current.handed):
            return None
        begun = current.handed[outcome.began - 1]
        right = (begun.verify.round, begun.verify.nodes[0]) == (outcome.round + 1, outcome.bonus)
        return begun if right else None
