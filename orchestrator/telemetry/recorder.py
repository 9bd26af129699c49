"""Counts and times of one request, defined once (docs/guide/statistics.md)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from orchestrator.learning.round_observation import RoundObservation
from orchestrator.sequence.draft import Draft
from protocol.messages import (
    HISTOGRAM_BOUNDS_MS,
    DraftTree,
    Origin,
    Prefilled,
    Role,
    RoundStats,
    Schedule,
    Statistics,
    TimingHistogram,
    TokenOrigin,
    VerificationOutcome,
)

if TYPE_CHECKING:
    from orchestrator.telemetry.timeline import Timeline


@dataclass
class Recorder:
    """Collects statistics while a request runs. Times are seconds of one monotonic clock."""

    received_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    emitted: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    drafter_restarts: int = 0
    verifier_restarts: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    offered_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    phases: dict[str, list[float]] = field(default_factory=dict)
    drafting_s: float = 0.0
    overlapped_s: float = 0.0
    verifying_since: float | None = None
    plain_rounds: int = 0
    plain_tok_s: float = 0.0
    plain_age_s: float = 0.0
    tree_rounds: int = 0
    branch_tokens: int = 0
    drafter: str = ""
    state_bytes: int = 0
    offered_by_lag: Counter[int] = field(default_factory=Counter)
    accepted_by_lag: Counter[int] = field(default_factory=Counter)
    stale_trees: int = 0
    rewinding: str = ""
    planned: Schedule | None = None
    by_origin: dict[Origin, RoundStats] = field(default_factory=dict)
    ranks: Counter[int] = field(default_factory=Counter)
    was_suspended: bool = False
    """True if its place was given away since the last token: the next interval does not count."""
    timeline: "Timeline | None" = None
    """Events of each process, if the client asked for them."""
    _last_origin: Origin = "target"
    _last_accepted: int = 0
    _first_lag: int = 0
    """Lag of the last round's draft; 0 if no drafter made it."""

    def take_last_token_at(self) -> float | None:
        """Return and clear the end time of the previous round; None after a restart."""
        afresh, self.was_suspended = self.was_suspended or not self.rounds, False
        return None if afresh else self.last_token_at

    def count_emitted(self, tokens: int, now: float) -> None:
        """Count tokens that became part of the answer."""
        if tokens == 0:
            return
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.emitted += tokens

    def add_times(
        self, outcome: VerificationOutcome, draft: Draft, origin: Origin, now: float
    ) -> None:
        """Add the times of a verification of this draft, which came from `origin`."""
        tokens = len(draft) + 1
        if outcome.sequences == 1 and outcome.rows:
            tokens = outcome.rows  # what a grammar rules out was not considered
        if self.timeline is not None:
            self.timeline.add_verification(outcome, tokens, draft.depth, origin, now)
        self.add_time("verify", outcome.verify_ms)
        self.add_time(f"verify_{tokens}", outcome.verify_ms)
        if self.rounds:  # before the first round the verifier had nothing to do
            self.add_time("idle_hit" if origin == "hit" else "idle_other", outcome.idle_ms)

    def add_round(self, observation: RoundObservation, accepted: int) -> None:
        """Add a round that has just ended; `accepted` draft tokens belong to the answer."""
        if not self.rounds:
            return  # it brought the first token, which does not count as decoding
        old = self.by_origin.get(observation.origin, RoundStats())
        self.by_origin[observation.origin] = RoundStats(
            rounds=old.rounds + 1,
            accepted=old.accepted + accepted,
            drafted=old.drafted + len(observation.confidences),
            verify_ms=old.verify_ms + observation.verify_ms,
            cache_lookups=old.cache_lookups
            + (observation.mode == "ssd" and observation.speculating),
            cache_hits=old.cache_hits + (observation.rank is not None),
        )
        if observation.rank is not None:
            self.ranks[observation.rank] += 1

    def count_states(self, size: int) -> None:
        """Count hidden states sent to the drafter; those of the prompt belong to its prefill."""
        if self.rounds:
            self.state_bytes += size

    def count_verified(self, draft: Draft, accepted: Sequence[TokenOrigin], origin: Origin) -> None:
        """Count a verification of a draft from `origin`, and the origins of its accepted tokens."""
        self.rounds, self._last_origin = self.rounds + 1, origin
        # A hit was drafted before its round: after the previous chain and bonus token.
        lags: dict[Origin, int] = {"hit": self._last_accepted + 2, "miss": 1}
        self._first_lag = lags.get(origin, 0)
        if self._first_lag:
            self.offered_by_lag.update(range(self._first_lag, self._first_lag + draft.depth))
            self.accepted_by_lag.update(range(self._first_lag, self._first_lag + len(accepted)))
        self.drafted += len(draft)
        self.accepted += len(accepted)
        self.tree_rounds += not draft.is_chain
        self.branch_tokens += accepted.count("branch")
        self.offered_at.update(range(draft.depth))
        self.accepted_at.update(range(len(accepted)))
        self._last_accepted = len(accepted)

    def retract(self, origins: Sequence[TokenOrigin]) -> None:
        """Remove the last tokens, with these origins: a stop string cut them off."""
        drafted = len(origins) - origins.count("target")
        self.emitted -= len(origins)
        self.accepted -= drafted
        if (kind := self.by_origin.get(self._last_origin)) is not None:
            self.by_origin[self._last_origin] = replace(kind, accepted=kind.accepted - drafted)
        self.branch_tokens -= origins.count("branch")
        first, last = self._last_accepted - drafted, self._last_accepted
        self.accepted_at.subtract(range(first, last))
        if self._first_lag:
            self.accepted_by_lag.subtract(range(self._first_lag + first, self._first_lag + last))

    def add_time(self, name: str, milliseconds: float) -> None:
        """Add one sample of a phase."""
        self.phases.setdefault(name, []).append(milliseconds)

    def add_prefill(self, role: Role, message: Prefilled, now: float) -> None:
        """Add a service's prefill of the prompt."""
        self.add_time(f"prefill_{role}", message.prefill_ms)
        if self.timeline is not None:
            self.timeline.add_prefill(role, message, now)

    def add_dispatch(self, woke: float, now: float) -> None:
        """Add the time from an outcome's arrival to the next `Verify`, after a hit."""
        self.add_time("dispatch", 1e3 * (now - woke))
        if self.timeline is not None:
            self.timeline.add("orchestrator", "dispatch", woke, now)

    def add_wait(self, since: float, now: float) -> None:
        """Add a time in which the target waited for a draft."""
        self.add_time("draft_wait", 1e3 * (now - since))
        if self.timeline is not None:
            self.timeline.add("orchestrator", "draft wait", since, now)

    def add_tree(self, tree: DraftTree, now: float) -> None:
        """Add a depth of drafting that ended now; time during a verification counts as hidden."""
        self.add_time(f"draft_{tree.depth}", tree.draft_ms)
        if self.timeline is not None:
            self.timeline.add_draft(tree, now)
        started = now - tree.draft_ms / 1e3
        self.drafting_s += now - started
        if self.verifying_since is not None:
            self.overlapped_s += max(0.0, now - max(started, self.verifying_since))

    def histograms(self) -> dict[str, TimingHistogram]:
        """Return the distribution of times of each phase."""
        histograms = {}
        for name, values in self.phases.items():
            classes = Counter(bisect_left(HISTOGRAM_BOUNDS_MS, value) for value in values)
            counts = [classes[index] for index in range(len(HISTOGRAM_BOUNDS_MS) + 1)]
            histograms[name] = TimingHistogram(counts, sum(values))
        return histograms

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from the request to the first token."""
        first = self.first_token_at
        return 1e3 * (first - self.received_at) if first is not None else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        if self.first_token_at is None or self.last_token_at is None:
            return 0.0
        return self.last_token_at - self.first_token_at

    @property
    def tok_s(self) -> float:
        """Decoded tokens per second, without the first."""
        return ratio(max(0, self.emitted - 1), self.decode_s)

    def summarise(self) -> Statistics:
        """Return the request's statistics so far."""
        positions = range(max(self.offered_at, default=-1) + 1)
        return Statistics(
            ttft_ms=self.ttft_ms,
            decode_s=self.decode_s,
            tok_s=self.tok_s,
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            acceptance_rate=ratio(self.accepted, self.drafted),
            mean_acceptance_length=1.0 + ratio(self.accepted, self.rounds),
            per_position=[ratio(self.accepted_at[i], self.offered_at[i]) for i in positions],
            offered_per_position=[self.offered_at[i] for i in positions],
            accepted_per_position=[self.accepted_at[i] for i in positions],
            cache_hits=self.hits,
            cache_misses=self.misses,
            hit_rate=ratio(self.hits, self.hits + self.misses),
            fallbacks=dict(self.fallbacks),
            overlap_ratio=ratio(self.overlapped_s, self.drafting_s),
            phase_ms={name: _middle(values) for name, values in self.phases.items()},
            drafter_restarts=self.drafter_restarts,
            verifier_restarts=self.verifier_restarts,
            plain_rounds=self.plain_rounds,
            plain_tok_s=self.plain_tok_s,
            plain_age_s=self.plain_age_s,
            tree_rounds=self.tree_rounds,
            branch_tokens=self.branch_tokens,
            drafter=self.drafter,
            state_bytes=self.state_bytes,
            stale_trees=self.stale_trees,
            rewinding=self.rewinding,
            planned=self.planned,
            by_origin=dict(self.by_origin),
            hits_by_rank=[self.ranks[i] for i in range(max(self.ranks, default=-1) + 1)],
            draft_wait_ms=sum(self.phases.get("draft_wait", ())),
            **self._by_lag(),
        )

    def _by_lag(self) -> dict[str, Any]:
        """Counts as lists; the first lag is 1."""
        lags = range(1, max(self.offered_by_lag, default=0) + 1)
        return {
            "offered_by_lag": [self.offered_by_lag[lag] for lag in lags],
            "accepted_by_lag": [self.accepted_by_lag[lag] for lag in lags],
        }


def ratio(part: float, whole: float) -> float:
    """Return the part as a fraction of the whole; 0 for an empty whole."""
    return part / whole if whole else 0.0


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
