"""Statistics of all requests in the last seconds: a window over existing counters.

Costs an addition and a comparison per wake-up of the orchestrator, and a sum over the running
requests twice a second. Pure: every time is an argument.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.telemetry.recorder import Recorder, ratio
from protocol.messages import WindowStats

_STEP_S = 0.5
"""Time between two samples."""
_WINDOW_S = 10.0


class Totals(NamedTuple):
    """Counts since the start, or differences of such counts."""

    at: float = 0.0
    """Time of the sample in seconds."""
    busy_s: float = 0.0
    """Time in which any request was running."""
    requests: int = 0
    """Number of requests that have ended."""
    tokens: int = 0
    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0

    def plus(self, recorder: Recorder) -> "Totals":
        """Return the sum with one request's counts; `at`, `busy_s` and `requests` are unchanged."""
        r = recorder
        return self._replace(
            tokens=self.tokens + r.emitted,
            rounds=self.rounds + r.rounds,
            plain_rounds=self.plain_rounds + r.plain_rounds,
            drafted=self.drafted + r.drafted,
            accepted=self.accepted + r.accepted,
            hits=self.hits + r.hits,
            misses=self.misses + r.misses,
        )

    def since(self, before: "Totals") -> "Totals":
        """Return the increase since `before`, at least 0: a stop string removes tokens again."""
        pairs = zip(self, before, strict=True)
        return Totals._make(max(0, new - old) for new, old in pairs)


class StatsWindow:
    """Counts of all requests, now and a few seconds ago."""

    def __init__(self) -> None:
        self._ended = Totals()
        self._busy_s = 0.0
        self._samples: deque[Totals] = deque()
        self._seen = 0.0
        self._was_busy = False

    def wake(self, now: float, *, busy: bool) -> bool:
        """Advance the clock at a wake-up; `busy` is True if any request runs from now on.

        Returns True if a sample is due.

        Returns:
            Whether it is time for a sample.
        """
        if self._was_busy:
            self._busy_s += now - self._seen
        self._seen, self._was_busy = now, busy
        return not self._samples or now - self._samples[-1].at >= _STEP_S

    def sample(self, now: float, running: Iterable[Recorder]) -> None:
        """Record the totals at this time."""
        self._samples.append(self._totals(now, running))
        while len(self._samples) > 1 and self._samples[1].at <= now - _WINDOW_S:
            self._samples.popleft()

    def end(self, recorder: Recorder) -> None:
        """Add an ended request, which is no longer among the running ones."""
        totals = self._ended.plus(recorder)
        self._ended = totals._replace(requests=totals.requests + 1)

    def recent(self, now: float, running: Iterable[Recorder]) -> WindowStats:
        """Return the statistics of the last seconds, up to ten."""
        latest = self._totals(now, running)
        added = latest.since(self._samples[0] if self._samples else latest)
        return WindowStats(
            seconds=added.at,
            busy_s=added.busy_s,
            requests=added.requests,
            tokens=added.tokens,
            tok_s=ratio(added.tokens, added.busy_s),
            rounds=added.rounds,
            plain_rounds=added.plain_rounds,
            drafted=added.drafted,
            accepted=added.accepted,
            acceptance_rate=ratio(added.accepted, added.drafted),
            cache_hits=added.hits,
            cache_misses=added.misses,
            hit_rate=ratio(added.hits, added.hits + added.misses),
        )

    def _totals(self, now: float, running: Iterable[Recorder]) -> Totals:
        totals = self._ended._replace(at=now, busy_s=self._busy_s)
        for recorder in running:
            totals = totals.plus(recorder)
        return totals
