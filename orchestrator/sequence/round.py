"""One verification in flight: what is verified, and what is prepared meanwhile."""

from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.learning.cost_model import RoundObservation
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.speculation_cache import Draft, SpeculationCache
from protocol.messages import Origin, Tokens, VerificationOutcome, Verify


class NextRound(NamedTuple):
    """How a round would begin."""

    draft: Draft
    """What is verified of the draft."""
    rest: Draft
    """What is not."""
    verify: Verify


@dataclass
class Round:
    """Replaced as a whole when the next one starts."""

    chain: Tokens = field(default_factory=list)
    draft: Draft = field(default_factory=Draft)
    """The draft tokens of the chain."""
    origin: Origin = "target"
    """Where the chain came from."""
    speculating: bool = False
    """Whether a drafter works beside the verification, or drafted for it."""
    cache: SpeculationCache = field(default_factory=SpeculationCache)
    ahead: dict[tuple[int, int], NextRound] = field(default_factory=dict)
    """The rounds that the prepared outcomes lead to."""
    untried: Draft = field(default_factory=Draft)
    """What lookup would have offered; it is learned from without being verified."""

    def forget(self) -> None:
        """What was prepared is worthless."""
        self.cache = SpeculationCache()
        self.ahead = {}

    def lesson(
        self, outcome: VerificationOutcome, plan: Planner, *, first: bool
    ) -> RoundObservation:
        """What it taught; before the `first` of a request the verifier had nothing to do."""
        rank, prepared = self.cache.rank(outcome.accepted, outcome.bonus)
        untried = self.untried
        right = len(untried) > 0 and untried.tokens[0] == outcome.bonus
        return RoundObservation(
            mode=plan.mode,
            by_hand=plan.num_draft_tokens > 0,
            tried_saguaro=plan.tried_saguaro,
            speculating=self.speculating,
            origin=self.origin,
            confidences=self.draft.confidences,
            accepted=outcome.accepted,
            prepared=prepared,
            rank=rank,
            verify_ms=outcome.verify_ms,
            idle_ms=None if first else outcome.idle_ms,
            sequences=outcome.sequences,
            all_tokens=outcome.rows,
            untried=(untried.confidences[0], right) if len(untried) else None,
        )
