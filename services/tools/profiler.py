"""`python -m services.tools.profiler SETTINGS`: time one model of a pair.

It runs the services' own code without sockets: a verification, a step of a tree. It reads and
writes JSON lines on stdin and stdout (`protocol.jobs.profile`).
"""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec

from protocol.decoding.token_tree import read_tree
from protocol.errors import SsdError
from protocol.jobs.profile import (
    ProfilerReady,
    ProfilerRequest,
    ProfilerSettings,
    TimeRequest,
    TimeResult,
    WorkRequest,
    WorkResult,
)
from protocol.messages import OpenSequence, Sampling, Tokens, VerificationOutcome, Verify
from protocol.process.child import pin_to_cores
from protocol.settings import PREFILL_STEP_SIZE, VerifierSettings, decode_settings
from services.kernels.cpu.library import load_blas
from services.mlx.lean_imports import leave_out_unused_libraries
from services.runtime.preparation import run_all

_REPEATS = 7
_DEPTHS = 4

Timer = Callable[[int, int], list[float]]
"""(count, repeats) -> the milliseconds of each."""


class Profiler(contextlib.ExitStack):
    """One model and its timers, with the ranks of a target that is spread over several."""

    unit: str
    _open: Callable[[Tokens], Timer]

    def load(self, settings: ProfilerSettings) -> None:
        """Load the model to be timed; errors as for `open_target` and `MlxBackend`."""
        part = self._verifier if settings.part == "verifier" else self._drafter
        self._open = part(settings)

    def _verifier(self, settings: ProfilerSettings) -> Callable[[Tokens], Timer]:
        # MLX must be imported after the BLAS is in place.
        from services.verifier.open_target import open_target  # noqa: PLC0415
        from services.verifier.verifier import Verifier  # noqa: PLC0415

        told = _as_verifier(settings)
        model, target, self.unit, _ = self.enter_context(open_target(told))
        verifier = Verifier(model, PREFILL_STEP_SIZE, target=target)

        def open_context(context: Tokens) -> Timer:
            for _ in verifier.handle(OpenSequence(sequence=0, tokens=context, sampling=Sampling())):
                pass
            position = len(context)

            def run(count: int, repeats: int) -> list[float]:
                nonlocal position
                times = []
                for _ in range(repeats):
                    chain = [context[0]] * min(count, 1 + verifier.max_draft_tokens)
                    question = Verify(sequence=0, round=0, position=position, nodes=chain)
                    for answer in verifier.handle(question):
                        if isinstance(answer, VerificationOutcome):
                            times.append(answer.verify_ms)
                            position += answer.accepted + 1
                return times

            return run

        return open_context

    def _drafter(self, settings: ProfilerSettings) -> Callable[[Tokens], Timer]:
        from services.drafter.backends.mlx import MlxBackend  # noqa: PLC0415
        from services.mlx.device import bind  # noqa: PLC0415

        self.unit = bind(settings.device)
        backend = MlxBackend(
            Path(settings.model), PREFILL_STEP_SIZE, weights=settings.draft_weights
        )
        run_all(backend.try_kernels())
        run_all(backend.try_drafts())

        def open_context(context: Tokens) -> Timer:
            backend.close(0)
            for _ in backend.open(0, context, Sampling()):
                pass

            def run(count: int, repeats: int) -> list[float]:
                times: list[float] = []
                while len(times) < repeats:
                    before = None
                    for _layer in backend.prepare(0, read_tree([context[0]]), [count], _DEPTHS):
                        now = time.perf_counter()
                        if before is not None:  # the first depth also feeds the chain
                            times.append(1e3 * (now - before))
                        before = now
                return times[:repeats]

            return run

        return open_context

    def answer(self, question: ProfilerRequest) -> TimeResult | WorkResult:
        """Run the requested measurement."""
        timer = self._open(question.context)
        if isinstance(question, WorkRequest):
            started = time.perf_counter()
            timer(question.count, question.repeats)
            return WorkResult(time.perf_counter() - started)
        medians = {}
        for count in question.counts:
            timer(count, 2)  # new shapes cost more the first time
            medians[str(count)] = median(timer(count, _REPEATS))
        return TimeResult(medians, self.unit)


def _as_verifier(settings: ProfilerSettings) -> VerifierSettings:
    return VerifierSettings(
        lifeline=0,
        address="",
        model=settings.model,
        threads=settings.threads,
        device=settings.device,
        adapter=settings.adapter,
        metal_kernels=settings.metal_kernels,
        ranks=settings.ranks,
    )


def main() -> int:
    """Answer requests until standard input ends."""
    try:
        settings = decode_settings(sys.argv[1], ProfilerSettings)
        pin_to_cores(settings.cores)
        load_blas(settings.threads)
        leave_out_unused_libraries()
        with Profiler() as profiler:
            profiler.load(settings)
            _say(ProfilerReady(profiler.unit))
            for line in sys.stdin:
                _say(profiler.answer(msgspec.json.decode(line, type=TimeRequest | WorkRequest)))
    except SsdError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _say(message: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
