"""Times target and drafter alone, each in a process like its service."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from launch.bench.result import Overlap
from launch.models.pair import Pair
from launch.settings.machine import share_cores
from launch.settings.ranks import rank_group
from launch.settings.settings import StackSettings
from launch.workers.worker import JsonWorker
from protocol.jobs.profile import (
    ProfiledRole,
    ProfilerReady,
    ProfilerSettings,
    TimeRequest,
    TimeResult,
    WorkRequest,
    WorkResult,
)
from protocol.messages import Tokens

CHAINS = [1, 2, 3, 4, 5, 6, 8]
BRANCHES = [1, 4, 8, 16, 24, 32]

_CONTEXT = 128
_WORK_S = 1.5
"""Approximate working time of each side in the overlap measurement."""
_MOST_ADDED = 2000
"""Tokens that verifications may add to their context: a tiny target fits many into that time."""
_WIDTH = 16
_CHAIN = 5


class ProfilerWorker(JsonWorker):
    """A process with one loaded model of the pair."""

    def __init__(self, part: ProfiledRole, settings: StackSettings, pair: Pair) -> None:
        shared = share_cores(pair.backend)
        target = part == "verifier"
        ranks = rank_group(settings, shared.verifier) if target else None
        cores = shared.verifier if target else shared.drafter
        if ranks:
            cores = ranks.hosts[0].cores
        profiler_settings = ProfilerSettings(
            part=part,
            model=pair.model if target else pair.draft_model,
            threads=max(1, len(cores)),
            cores=cores,
            device=settings.target_device if target else settings.draft_device,
            adapter=pair.adapter if target else "",
            draft_weights=settings.draft_weights,
            metal_kernels=settings.metal_kernels,
            ranks=ranks,
        )
        super().__init__(
            "profiler",
            "services.tools.profiler",
            profiler_settings,
            device=profiler_settings.device,
            environment=ranks.hosts[0].environment if ranks else {},
        )
        self.part = part
        self.unit = ""

    def await_ready(self) -> None:
        """Wait until the model is loaded."""
        self.unit = self.receive(ProfilerReady).compute_unit

    @property
    def name(self) -> str:
        """Name of the timed model."""
        return f"{'target' if self.part == 'verifier' else 'drafter'} ({self.unit})"


@dataclass
class ProfilerPair:
    """Profilers of both models; a drafter without a model has none."""

    target: ProfilerWorker
    drafter: ProfilerWorker | None
    context: Tokens

    def verify_ms(self) -> dict[str, float]:
        """Measure T_v(m)."""
        return self.target.ask(TimeRequest(CHAINS, self.context), TimeResult).medians_ms

    def draft_ms(self) -> dict[str, float]:
        """Measure T_d(B); empty without a draft model."""
        if self.drafter is None:
            return {}
        return self.drafter.ask(TimeRequest(BRANCHES, self.context), TimeResult).medians_ms

    def overlap(self) -> Overlap | None:
        """Measure both in turn, then together; None without a draft model."""
        if self.drafter is None:
            return None
        first = self._work(self.target, _CHAIN, _MOST_ADDED // _CHAIN)
        second = self._work(self.drafter, _WIDTH)
        alone = [profiler.ask(work, WorkResult).seconds for profiler, work in (first, second)]
        for profiler, work in (first, second):
            profiler.send(work)
        together = max(profiler.receive(WorkResult).seconds for profiler, _ in (first, second))
        hidden = (sum(alone) - together) / min(alone)
        return Overlap(
            first=f"{self.target.name}: {first[1].repeats} verifications of {_CHAIN} tokens",
            second=f"{self.drafter.name}: {second[1].repeats} steps of {_WIDTH} branches",
            first_ms=1e3 * alone[0],
            second_ms=1e3 * alone[1],
            together_ms=1e3 * together,
            speed_up=sum(alone) / together,
            efficiency=min(1.0, max(0.0, hidden)),
        )

    def _work(
        self, profiler: ProfilerWorker, count: int, most: int = sys.maxsize
    ) -> tuple[ProfilerWorker, WorkRequest]:
        """Return the work that fills the intended time, `most` repeats at most."""
        [each_ms] = profiler.ask(TimeRequest([count], self.context), TimeResult).medians_ms.values()
        repeats = min(max(2, round(1e3 * _WORK_S / each_ms)), most)
        return profiler, WorkRequest(count, repeats, self.context)


@contextlib.contextmanager
def open_profilers(settings: StackSettings, pair: Pair, text: Tokens) -> Iterator[ProfilerPair]:
    """Start both profilers, with a context made of `text` repeated."""
    context = (text * (1 + _CONTEXT // len(text)))[:_CONTEXT]
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(ProfilerWorker("verifier", settings, pair))
        drafter = None
        if pair.draft_model and pair.backend == "mlx":
            drafter = stack.enter_context(ProfilerWorker("drafter", settings, pair))
            drafter.await_ready()
        target.await_ready()
        yield ProfilerPair(target, drafter, context)
