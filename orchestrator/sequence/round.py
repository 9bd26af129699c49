"""One verification in flight: what is verified, and what is prepared meanwhile."""

from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.learning.round_observation import RoundObservation
from orchestrator.sequence.draft import Draft
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.speculation_cache import OutcomeKey, SpeculationCache
from orchestrator.telemetry.recorder import Recorder
from protocol.messages import (
    DraftNow,
    DraftTree,
    FinishReason,
    Origin,
    Prepare,
    TokenOrigin,
    Tokens,
    VerificationOutcome,
    Verify,
)


class NextRound(NamedTuple):
    """How a round would begin."""

    draft: Draft
    """What is verified."""
    offered: Draft
    """The draft that it is taken from."""
    rows: list[int]
    """Which rows of that."""
    verify: Verify


@dataclass
class Round:
    """Replaced as a whole when the next one starts."""

    nodes: Tokens = field(default_factory=list)
    """The pending token and the draft tokens."""
    draft: Draft = field(default_factory=Draft)
    """The draft tokens that are verified."""
    offered: Draft = field(default_factory=Draft)
    """The draft that they were taken from."""
    rows: list[int] = field(default_factory=list)
    """Their rows in it."""
    origin: Origin = "target"
    """Where the draft came from."""
    speculating: bool = False
    """Whether a drafter works beside the verification, or drafted for it."""
    cache: SpeculationCache = field(default_factory=SpeculationCache)
    next_rounds: dict[OutcomeKey, NextRound] = field(default_factory=dict)
    """The rounds that the prepared outcomes lead to."""
    waited_ms: float = 0.0
    """How long its draft was waited for."""
    continues_run: bool = False
    """Whether it is one of a free run, behind the first."""
    is_beside: bool = False
    """Whether the drafter works during the pass."""
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
        asked = self.asked
        if asked is None or not all(0 <= row < len(asked.nodes) for row, _ in tree.outcomes):
            return False
        return fits(tree, asked, sum(asked.fan_out))

    def origins(self, outcome: VerificationOutcome) -> list[TokenOrigin]:
        """Where each token came from that the outcome adds."""
        main = set(self.draft.main)
        path = self.draft.path(outcome.row)
        return [*(self.origin if row in main else "branch" for row in path), "target"]

    def observe(
        self,
        outcome: VerificationOutcome,
        planner: Planner,
        *,
        ended_at: float,
        last_token_at: float | None,
    ) -> RoundObservation:
        """What the round showed; `last_token_at` is of the one before it, None: it is the first."""
        rank, prepared = self.cache.rank(outcome.row, outcome.bonus)
        return RoundObservation(
            mode=planner.mode,
            by_hand=planner.num_draft_tokens > 0,
            continues_run=self.continues_run,
            waited_ms=self.waited_ms,
            speculating=self.speculating,
            beside=self.is_beside,
            origin=self.origin,
            confidences=self.draft.confidences,
            accepted=outcome.accepted,
            prepared=prepared,
            rank=rank,
            verify_ms=outcome.verify_ms,
            idle_ms=None if last_token_at is None else outcome.idle_ms,
            since_last_ms=None if last_token_at is None else 1e3 * (ended_at - last_token_at),
            sequences=outcome.sequences,
            all_tokens=outcome.rows,
            parents=self.draft.parents,
            path=self.draft.path(outcome.row),
            unverified_lookup=self._judge_lookup(outcome),
            ended_at=ended_at,
        )

    def _judge_lookup(self, outcome: VerificationOutcome) -> tuple[float, bool] | None:
        """Confidence of its first token, and whether the target chose that."""
        lookup = self.unverified_lookup
        if not len(lookup):
            return None
        return lookup.confidences[0], lookup.tokens[0] == outcome.bonus


def fits(tree: DraftTree, asked: Prepare | DraftNow | None, branches: int) -> bool:
    """Whether one depth of so many branches is no deeper, no wider and no other than asked for."""
    if asked is None:
        return False
    deepest = asked.depth if isinstance(asked, Prepare) else asked.count
    if not 1 <= tree.depth <= deepest or (tree.parents and not asked.siblings):
        return False
    return len(tree.tokens) <= branches * (1 + asked.siblings)


class EndedRound(NamedTuple):
    """A round whose end is not in the books yet."""

    round: Round
    outcome: VerificationOutcome
    emitted: Tokens
    """Those that belong to the answer."""
    ends: FinishReason | None

    def record(self, recorder: Recorder, seen: RoundObservation, now: float) -> list[TokenOrigin]:
        """Do the statistics; returns where each of the emitted tokens came from."""
        done, outcome = self.round, self.outcome
        recorder.plain_rounds += not done.speculating and done.origin != "lookup"
        recorder.add_times(outcome, done.draft, done.origin, now)
        recorder.add_round(seen)
        kept, origins = len(self.emitted), done.origins(outcome)
        accepted = origins[: min(kept, outcome.accepted)]
        recorder.count_verified(done.draft, accepted, done.origin)
        recorder.count_emitted(kept, now)
        return origins[:kept]
