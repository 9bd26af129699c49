"""Counts of one request, defined once (docs/guide/statistics.md)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from orchestrator.learning.cost_model import RoundObservation
from orchestrator.telemetry.timeline import Timeline
from protocol.messages import (
    HISTOGRAM_BOUNDS_MS,
    DraftTree,
    Origin,
    Prefilled,
    Role,
    RoundStats,
    Statistics,
    TimingHistogram,
    VerificationOutcome,
)


@dataclass
class Recorder:
    """Collects while a request runs. Times are seconds of one monotonic clock."""

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
    stale_trees: int = 0
    emulated_cost: str = ""
    by_origin: dict[Origin, RoundStats] = field(default_factory=dict)
    ranks: Counter[int] = field(default_factory=Counter)
    timeline: Timeline | None = None
    """Who did what when, if somebody asked for it."""
    _predicted_tokens: float = 0.0
    _predicted_s: float = 0.0
    _last_accepted: int = 0

    def emit(self, tokens: int, now: float) -> None:
        """`tokens` tokens were emitted."""
        if tokens == 0:
            return
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.emitted += tokens

    def timed(self, outcome: VerificationOutcome, tokens: int, origin: Origin, now: float) -> None:
        """The times of a verification of `tokens` tokens; its chain came from `origin`."""
        if outcome.sequences == 1 and outcome.rows:
            tokens = outcome.rows  # what a grammar rules out was not looked at
        if self.timeline is not None:
            self.timeline.verified(outcome, tokens, origin, now)
        self.phase("verify", outcome.verify_ms)
        self.phase(f"verify_{tokens}", outcome.verify_ms)
        if self.rounds:  # before the first round the verifier had nothing to do
            self.phase("idle_hit" if origin == "hit" else "idle_other", outcome.idle_ms)

    def learned(self, lesson: RoundObservation) -> None:
        """What a round taught that ended just now."""
        if not self.rounds:
            return  # it brought the first token, which is not part of the decoding
        old = self.by_origin.get(lesson.origin, RoundStats())
        self.by_origin[lesson.origin] = RoundStats(
            rounds=old.rounds + 1,
            tokens=old.tokens + lesson.accepted + 1,
            verify_ms=old.verify_ms + lesson.verify_ms,
            cache_lookups=old.cache_lookups + (lesson.mode == "ssd" and lesson.speculating),
            cache_hits=old.cache_hits + (lesson.rank is not None),
        )
        if lesson.rank is not None:
            self.ranks[lesson.rank] += 1

    def verified(self, drafted: int, accepted: int) -> None:
        """A verification was offered `drafted` tokens and `accepted` of them were emitted."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.offered_at.update(range(drafted))
        self.accepted_at.update(range(accepted))
        self._last_accepted = accepted

    def predicted(self, tokens: float, milliseconds: float) -> None:
        """What was expected of a round before it began."""
        self._predicted_tokens += tokens
        self._predicted_s += milliseconds / 1e3

    def retract(self, tokens: int, drafted: int) -> None:
        """The last `tokens` tokens, `drafted` of them draft tokens, were cut by a stop string."""
        self.emitted -= tokens
        self.accepted -= drafted
        self.accepted_at.subtract(range(self._last_accepted - drafted, self._last_accepted))

    def phase(self, name: str, milliseconds: float) -> None:
        """One sample of a phase."""
        self.phases.setdefault(name, []).append(milliseconds)

    def prefilled(self, role: Role, message: Prefilled, now: float) -> None:
        """A service has taken in the prompt."""
        self.phase(f"prefill_{role}", message.prefill_ms)
        if self.timeline is not None:
            self.timeline.prefilled(role, message, now)

    def dispatched(self, woke: float, now: float) -> None:
        """From an outcome's arrival to the next verification's departure, after a hit."""
        self.phase("dispatch", 1e3 * (now - woke))
        if self.timeline is not None:
            self.timeline.add("orchestrator", "dispatch", woke, now)

    def waited(self, since: float, now: float) -> None:
        """The target waited for a draft."""
        self.phase("draft_wait", 1e3 * (now - since))
        if self.timeline is not None:
            self.timeline.add("orchestrator", "draft wait", since, now)

    def drew(self, tree: DraftTree, now: float) -> None:
        """The drafter worked until `now`; what fell into a verification was hidden by it."""
        self.phase(f"draft_{tree.depth}", tree.draft_ms)
        if self.timeline is not None:
            self.timeline.drafted(tree, now)
        started = now - tree.draft_ms / 1e3
        self.drafting_s += now - started
        if self.verifying_since is not None:
            self.overlapped_s += max(0.0, now - max(started, self.verifying_since))

    def histograms(self) -> dict[str, TimingHistogram]:
        """How the times of each phase are spread."""
        found = {}
        for name, values in self.phases.items():
            classes = Counter(bisect_left(HISTOGRAM_BOUNDS_MS, value) for value in values)
            counts = [classes[index] for index in range(len(HISTOGRAM_BOUNDS_MS) + 1)]
            found[name] = TimingHistogram(counts, sum(values))
        return found

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        if self.first_token_at is None or self.last_token_at is None:
            return 0.0
        return self.last_token_at - self.first_token_at

    @property
    def tok_s(self) -> float:
        """Decoded tokens per second, without the first."""
        return ratio(max(0, self.emitted - 1), self.decode_s)

    def summary(self) -> Statistics:
        """The request's statistics so far."""
        first = self.first_token_at
        positions = range(max(self.offered_at, default=-1) + 1)
        return Statistics(
            ttft_ms=1e3 * (first - self.received_at) if first is not None else 0.0,
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
            predicted_tok_s=ratio(self._predicted_tokens, self._predicted_s),
            plain_tok_s=self.plain_tok_s,
            stale_trees=self.stale_trees,
            emulated_cost=self.emulated_cost,
            by_origin=dict(self.by_origin),
            hits_by_rank=[self.ranks[i] for i in range(max(self.ranks, default=-1) + 1)],
            draft_wait_ms=sum(self.phases.get("draft_wait", ())),
        )


def ratio(part: float, whole: float) -> float:
    """Part of the whole; 0 of nothing."""
    return part / whole if whole else 0.0


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
