"""Stages of a verifier's preparation between requests: self-tests, timed passes and traces."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from protocol.settings import MetalKernels
from services.engine.prelaunch import open_prelauncher
from services.engine.target_model import Improvement, list_improvements
from services.kernels.metal.choice import use_kernels
from services.kernels.register import KERNELS, kernels
from services.runtime.loop import Identity
from services.runtime.preparation import Stage, Steps, tokenizer_stage
from services.verifier.pass_times import measure_passes, warm_verifier
from services.verifier.verifier import Verifier


class VerifierStages:
    """The preparation of a verifier.

    Args:
        verifier: to be prepared.
        identity: of the service, updated by the stages.
        kernels: use of the kernels for Metal.
    """

    def __init__(self, verifier: Verifier, identity: Identity, kernels: MetalKernels) -> None:
        self._verifier, self._identity = verifier, identity
        self._kernels: MetalKernels = kernels

    def list(self, folder: Path, *, is_whole: bool, prelaunches: bool) -> Iterator[Stage]:
        """Yield the stages.

        Args:
            folder: of the model.
            is_whole: False if the target is spread over ranks, and prepared by all of them.
            prelaunches: True if passes may be launched before their tokens are known.
        """
        yield tokenizer_stage(folder)
        if is_whole and kernels() is KERNELS["metal"]:
            yield Stage("kernels", self._try_metal_kernels)
        for name, improvement in list_improvements(self._verifier.target) if is_whole else ():
            yield Stage(name, partial(self._improve, improvement))
        if prelaunches:
            yield Stage("prelaunched passes", self._try_prelaunching)
        on_gpu = kernels().on_gpu
        if on_gpu:
            yield Stage("first passes", partial(warm_verifier, self._verifier))
        yield Stage("times of passes", self._time_passes, between_rounds=not on_gpu)

    def _try_metal_kernels(self) -> Steps[None]:
        module = self._verifier.target.verify
        yield from self._verifier.features.leave_out(use_kernels(module, self._kernels))

    def _improve(self, improvement: Improvement) -> Steps[None]:
        verifier, before = self._verifier, self._verifier.target
        target = yield from verifier.features.leave_out(improvement(before))
        if verifier.features.request is not None:
            target.read(verifier.features, unless=before)
        verifier.use(target)
        self._identity.takes_trees = verifier.takes_trees

    def _try_prelaunching(self) -> Steps[None]:
        scheduler, state = self._verifier.scheduler, self._verifier.new_state()
        scheduler.prelauncher = yield from open_prelauncher(scheduler.runner, state)

    def _time_passes(self) -> Steps[None]:
        times = yield from measure_passes(self._verifier, drafter_idle=True)
        if self._verifier.spare_cores.cores:
            contended = yield from measure_passes(self._verifier, drafter_idle=False)
            times = replace(times, contended=contended.chains)
        self._identity.pass_times = times
        if self._verifier.scheduler.prelauncher is not None:
            self._verifier.scheduler.prelauncher.expect_passes(times.chains)
