"""Prometheus metrics over all answers of this gateway."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.messages import HISTOGRAM_BOUNDS_MS, Finished, Mode, Status, TimingHistogram
from protocol.process.step_times import StepTimes

_RECENT = 50
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class _PhaseTimes(Collector):
    """Durations of rounds, which arrive as histogram buckets."""

    def __init__(self) -> None:
        self._spreads: dict[str, TimingHistogram] = {}

    def add(self, spreads: dict[str, TimingHistogram]) -> None:
        for phase, more in spreads.items():
            known = self._spreads.get(phase, TimingHistogram([0] * len(more.counts), 0.0))
            counts = [a + b for a, b in zip(known.counts, more.counts, strict=True)]
            self._spreads[phase] = TimingHistogram(counts, known.sum_ms + more.sum_ms)

    def collect(self) -> Iterator[Metric]:
        """Return the metric in seconds."""
        family = HistogramMetricFamily("ssd_round_seconds", "By phase.", labels=["phase"])
        bounds = [*(str(bound / 1e3) for bound in HISTOGRAM_BOUNDS_MS), "+Inf"]
        for phase, spread in self._spreads.items():
            buckets = list(zip(bounds, accumulate(spread.counts), strict=True))
            family.add_metric([phase], buckets, spread.sum_ms / 1e3)
        yield family


class Metrics:
    """A separate registry, so that two gateways in one process do not mix.

    Args:
        steps: step times of the gateway's event loop.
    """

    def __init__(self, steps: StepTimes | None = None) -> None:
        self._steps = steps or StepTimes()
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        """Figures of the last answers, oldest first."""
        r = self._registry = CollectorRegistry()
        decode = "ssd_spec_decode_num"
        self._requests = Counter(
            "ssd_requests", "Requests by how they ended.", ["reason"], registry=r
        )
        self._prompt = Counter("ssd_prompt_tokens", "Prompt tokens.", registry=r)
        self._cached = Counter(
            "ssd_cached_prompt_tokens", "Prompt tokens found in a KV.", registry=r
        )
        self._tokens = Counter("ssd_generation_tokens", "Tokens answered.", registry=r)
        self._drafts = Counter(f"{decode}_drafts", "Rounds with draft tokens.", registry=r)
        self._drafted = Counter(f"{decode}_draft_tokens", "Draft tokens offered.", registry=r)
        self._accepted = Counter(f"{decode}_accepted_tokens", "Draft tokens kept.", registry=r)
        self._positions = Counter(
            f"{decode}_accepted_tokens_per_pos",
            "Rounds that kept the draft token at this position.",
            ["position"],
            registry=r,
        )
        self._hits = Counter("ssd_cache_hits", "Outcomes prepared in time.", registry=r)
        self._misses = Counter("ssd_cache_misses", "Outcomes not prepared.", registry=r)
        self._fallback = Counter("ssd_fallback", "Rounds without a hit.", ["reason"], registry=r)
        self._restarts = Counter("ssd_drafter_restarts", "Drafters replaced.", registry=r)
        self._stale = Counter(
            "ssd_stale_trees", "Drafts dropped: too late, twice, or out of order.", registry=r
        )
        self._create_histograms()
        self._create_gauges()

    def _create_histograms(self) -> None:
        r = self._registry
        self._ttft = Histogram(
            "ssd_time_to_first_token_seconds", "From request to text.", buckets=_SECONDS, registry=r
        )
        self._per_token = Histogram(
            "ssd_time_per_output_token_seconds",
            "Of an answer's decoding.",
            buckets=_TOKEN_SECONDS,
            registry=r,
        )
        self._phases = _PhaseTimes()
        r.register(self._phases)

    def _create_gauges(self) -> None:
        """Create the gauges that are read from the orchestrator's status on request."""
        r = self._registry
        self._dropped = Gauge(
            "ssd_dropped_messages", "Messages dropped because no client read them.", registry=r
        )
        self._gateway_step = Gauge(
            "ssd_gateway_longest_step_seconds", "Of the last ten seconds or more.", registry=r
        )
        self._orchestrator_step = Gauge(
            "ssd_orchestrator_longest_step_seconds", "Of the last ten seconds or more.", registry=r
        )
        self._running = Gauge("ssd_requests_running", "Being decoded.", registry=r)
        self._waiting = Gauge("ssd_requests_waiting", "In line.", registry=r)
        self._speculating = Gauge(
            "ssd_speculating", "Whether the planner speculates (1) or not (0).", registry=r
        )
        self._num_draft_tokens = Gauge(
            "ssd_lookahead", "Longest draft it would verify.", registry=r
        )
        self._fan_out = Gauge("ssd_fan_out", "Branches it would prepare.", registry=r)

    def count_failure(self, reason: str) -> None:
        """Count a request that ended without an answer."""
        self._requests.labels(reason).inc()

    def count_answer(self, finished: Finished, tokens: int, mode: Mode) -> None:
        """Count an answer of `tokens` tokens."""
        s = finished.statistics
        self.recent.append(
            {
                "mode": mode,
                "tokens": tokens,
                "tok_s": s.tok_s,
                "ttft_ms": s.ttft_ms,
                "acceptance_rate": s.acceptance_rate,
                "hit_rate": s.hit_rate,
            }
        )
        self._requests.labels(finished.reason).inc()
        self._prompt.inc(finished.prompt_tokens)
        self._cached.inc(finished.cached_tokens)
        self._tokens.inc(tokens)
        self._drafts.inc(s.offered_per_position[0] if s.offered_per_position else 0)
        self._drafted.inc(s.drafted)
        self._accepted.inc(s.accepted)
        for position, count in enumerate(s.accepted_per_position):
            self._positions.labels(str(position)).inc(count)
        self._hits.inc(s.cache_hits)
        self._misses.inc(s.cache_misses)
        for reason, count in s.fallbacks.items():
            self._fallback.labels(reason).inc(count)
        self._restarts.inc(s.drafter_restarts)
        self._stale.inc(s.stale_trees)
        self._phases.add(finished.histograms)
        self._ttft.observe(s.ttft_ms / 1e3)
        if tokens > 1:
            self._per_token.observe(s.decode_s / (tokens - 1))

    def page(self, statuses: Sequence[Status]) -> bytes:
        """Return everything in Prometheus' text format; several models are added up."""
        self._gateway_step.set(self._steps.longest_s)
        longest_ms = max((status.longest_step_ms for status in statuses), default=0.0)
        self._orchestrator_step.set(longest_ms / 1e3)
        plans = [status.planner for status in statuses]
        self._running.set(sum(status.active for status in statuses))
        self._waiting.set(sum(status.waiting for status in statuses))
        self._dropped.set(sum(status.dropped for status in statuses))
        self._speculating.set(any(plan.speculating for plan in plans))
        self._num_draft_tokens.set(max((plan.num_draft_tokens for plan in plans), default=0))
        self._fan_out.set(max((plan.branches for plan in plans), default=0))
        return generate_latest(self._registry)
