"""One verification in flight: its draft, and what is prepared meanwhile."""

from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.learning.round_observation import RoundObservation
from orchestrator.sequence.draft import Draft
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.speculation_cache import SpeculationCache
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
    """The plan of a round that may follow."""

    draft: Draft
    """The draft to verify."""
    offered: Draft
    """The draft that it is taken from."""
    rows: list[int]
    """Rows of that draft."""
    verify: Verify


@dataclass
class Round:
    """The current round; replaced as a whole when the next one starts."""

    nodes: Tokens = field(default_factory=list)
    """The pending token and the draft tokens."""
    draft: Draft = field(default_factory=Draft)
    """The draft to verify."""
    offered: Draft = field(default_factory=Draft)
    """The draft that it was taken from."""
    rows: list[int] = field(default_factory=list)
    """Rows of that draft."""
    origin: Origin = "target"
    """Origin of the draft."""
    speculating: bool = False
    """True if a drafter works during the verification, or drafted for it."""
    cache: SpeculationCache = field(default_factory=SpeculationCache)
    waited_ms: float = 0.0
    """Time waited for its draft."""
    continues_run: bool = False
    """True if it is a round of a free run after the first."""
    is_contended: bool = False
    """True if the drafter works during the pass."""
    request: Prepare | None = None
    """The drafter's request to prepare during it, if any."""
    unverified_lookup: Draft = field(default_factory=Draft)
    """A prompt lookup that was not worth verifying; its correctness is observed."""

    def forget(self) -> None:
        """Drop the prepared outcomes: the drafter is gone."""
        self.cache = SpeculationCache()
        self.request = None

    def is_asked_for(self, tree: DraftTree) -> bool:
        """Return True if the drafter was asked to prepare a tree of this size, or a larger one."""
        request = self.request
        if request is None or not all(0 <= row < len(request.nodes) for row, _ in tree.outcomes):
            return False
        return fits(tree, request, sum(request.fan_out))

    def origins(self, outcome: VerificationOutcome) -> list[TokenOrigin]:
        """Return the origin of each token that the outcome adds."""
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
        """Return the observation of the round; `last_token_at` is the previous round's, None for
        the first.
        """
        rank, prepared = self.cache.rank(outcome.row, outcome.bonus)
        return RoundObservation(
            mode=planner.mode,
            by_hand=planner.num_draft_tokens > 0,
            continues_run=self.continues_run,
            waited_ms=self.waited_ms,
            speculating=self.speculating,
            is_contended=self.is_contended,
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
        """Return the confidence of its first token, and True if the target chose it."""
        lookup = self.unverified_lookup
        if not len(lookup):
            return None
        return lookup.confidences[0], lookup.tokens[0] == outcome.bonus


def fits(tree: DraftTree, request: Prepare | DraftNow | None, branches: int) -> bool:
    """Return True if a depth is within the request: not deeper, not wider, and not another
    round's.
    """
    if request is None:
        return False
    deepest = request.depth if isinstance(request, Prepare) else request.count
    if not 1 <= tree.depth <= deepest or (tree.parents and not request.siblings):
        return False
    return len(tree.tokens) <= branches * (1 + request.siblings)


class EndedRound(NamedTuple):
    """A round whose bookkeeping is pending."""

    round: Round
    outcome: VerificationOutcome
    emitted: Tokens
    """The tokens that belong to the answer."""
    ends: FinishReason | None

    def record(
        self, recorder: Recorder, observation: RoundObservation, now: float
    ) -> list[TokenOrigin]:
        """Record the statistics; return the origin of each emitted token."""
        done, outcome = self.round, self.outcome
        recorder.plain_rounds += not done.speculating and done.origin != "lookup"
        recorder.add_times(outcome, done.draft, done.origin, now)
        kept, origins = len(self.emitted), done.origins(outcome)
        accepted = origins[: min(kept, outcome.accepted)]
        recorder.add_round(observation, len(accepted))
        recorder.count_verified(done.draft, accepted, done.origin)
        recorder.count_emitted(kept, now)
        return origins[:kept]
