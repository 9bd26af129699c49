"""One verification in flight: what is verified, and what is prepared meanwhile."""

from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.learning.cost_model import RoundObservation
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.speculation_cache import Draft, SpeculationCache
from protocol.messages import DraftTree, Origin, Prepare, Tokens, VerificationOutcome, Verify


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
    rest: Draft = field(default_factory=Draft)
    """What the draft has beyond them."""
    origin: Origin = "target"
    """Where the chain came from."""
    speculating: bool = False
    """Whether a drafter works beside the verification, or drafted for it."""
    cache: SpeculationCache = field(default_factory=SpeculationCache)
    next_rounds: dict[tuple[int, int], NextRound] = field(default_factory=dict)
    """The rounds that the prepared outcomes lead to."""
    asked: Prepare | None = None
    """What the drafter was asked to prepare beside it, if anything."""
    unverified_lookup: Draft = field(default_factory=Draft)
    """A prompt lookup that was not worth verifying; whether it was right is observed."""

    def forget(self) -> None:
        """Drop what was prepared: the drafter is gone."""
        self.cache = SpeculationCache()
        self.next_rounds = {}
        self.asked = None

    def is_asked_for(self, tree: DraftTree) -> bool:
        """Whether the drafter was asked to prepare a tree of this size, or a larger one."""
        if self.asked is None or not 1 <= tree.depth <= self.asked.depth:
            return False
        within = all(0 <= accepted < len(self.chain) for accepted, _ in tree.outcomes)
        return within and len(tree.tokens) <= sum(self.asked.fan_out)

    def observe(
        self, outcome: VerificationOutcome, planner: Planner, *, first: bool
    ) -> RoundObservation:
        """What the round showed; before the `first` of a request the verifier was idle."""
        rank, prepared = self.cache.rank(outcome.accepted, outcome.bonus)
        lookup = self.unverified_lookup
        right = len(lookup) > 0 and lookup.tokens[0] == outcome.bonus
        return RoundObservation(
            mode=planner.mode,
            by_hand=planner.num_draft_tokens > 0,
            tried_saguaro=planner.tried_saguaro,
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
            unverified_lookup=(lookup.confidences[0], right) if len(lookup) else None,
        )
