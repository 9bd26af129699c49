"""`python -m services.coreml.probe SETTINGS`: one measurement for `ssd mac-check`."""

import os
import select
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil

from protocol.errors import RuntimeFailure
from protocol.jobs.coreml_probe import PrefillTime, ProbeResult, ProbeSettings
from protocol.process.child import run_child
from services.coreml import costs
from services.coreml.architecture import read_architecture
from services.coreml.manifest import read_manifest
from services.coreml.model import ConvertedModel, chain_feed, open_model
from services.coreml.runtime.executor import ReferenceExecutor, limit_threads
from services.kernels.cpu.library import load_blas
from services.sampling.candidates import Top

_INJECTED, _CHUNK = 512, 64
_COMPARED = 64
_MEETING_S = 900.0
"""A first load compiles for minutes; half of the time that the parent waits for a probe."""


def run(settings: ProbeSettings) -> None:
    """Measure, and write the result to stdout."""
    load_blas(settings.threads)
    limit_threads(settings.threads)
    measure = {
        "functions": _functions,
        "device": _device,
        "draft-loop": _draft_loop,
        "target-loop": _target_loop,
        "injection": _injection,
        "prefill": _prefill,
        "soak": _soak,
    }[settings.kind]
    sys.stdout.write(msgspec.json.encode(measure(settings)).decode() + "\n")


def _model(settings: ProbeSettings) -> ConvertedModel:
    return open_model(Path(settings.model), settings.compute_units)


def _functions(settings: ProbeSettings) -> ProbeResult:
    """Return times and devices of every function."""
    model = _model(settings)
    return ProbeResult(
        kind="functions",
        compute_units=settings.compute_units,
        compute_unit=model.executor.compute_unit,
        costs=costs.measure(model, settings.calls),
    )


def _device(settings: ProbeSettings) -> ProbeResult:
    """Compare the same tokens on the device and on the reference runtime."""
    folder = Path(settings.model)
    device = _model(settings)
    reference = ConvertedModel(folder, ReferenceExecutor(folder, read_manifest(folder)))
    rng = np.random.default_rng(0)
    tokens = [int(token) for token in rng.integers(0, device.manifest.vocabulary_size, _COMPARED)]
    branches = device.manifest.function("tree").tokens
    results = []
    for model in (device, reference):
        state, tops = model.new_state(), []
        for start in range(0, _COMPARED, branches):
            part = tokens[start : start + branches]
            tops += model.run("tree", chain_feed(part, start, model.slots), state)
        results.append(tops)
    pairs = list(zip(*results, strict=True))
    return ProbeResult(
        kind="device",
        compute_units=settings.compute_units,
        compute_unit=device.executor.compute_unit,
        calls=len(pairs),
        same_best=float(np.mean([a.ids[0, 0] == b.ids[0, 0] for a, b in pairs])),
        worst_logit=max(abs(float(a.logits[0, 0] - b.logits[0, 0])) for a, b in pairs),
    )


def _soak(settings: ProbeSettings) -> ProbeResult:
    """Run many calls: the same tokens into a fresh state must always give the same tokens.

    Drivers are known to crash, leak or drift after some hundred calls.
    """
    model, process = _model(settings), psutil.Process()
    rng = np.random.default_rng(0)
    tokens = [int(token) for token in rng.integers(0, model.manifest.vocabulary_size, _COMPARED)]
    first: list[Top] = []
    taken: list[float] = []
    resident, worst, same = 0, 0.0, 0
    while len(taken) < settings.calls:
        state = model.new_state()
        for at, token in enumerate(tokens[: settings.calls - len(taken)]):
            started = time.perf_counter()
            [top] = model.run("decode", chain_feed([token], at, model.slots), state)
            taken.append(time.perf_counter() - started)
            if len(first) == at:
                first.append(top)
            same += int(top.ids[0, 0] == first[at].ids[0, 0])
            worst = max(worst, abs(float(top.logits[0, 0] - first[at].logits[0, 0])))
        resident = resident or process.memory_info().rss
    return ProbeResult(
        kind="soak",
        compute_units=settings.compute_units,
        compute_unit=model.executor.compute_unit,
        calls=len(taken),
        per_second=len(taken) / sum(taken),
        slowest_ms=1e3 * max(taken),
        same_best=same / len(taken),
        worst_logit=worst,
        grown_mb=(process.memory_info().rss - resident) / 1e6,
    )


def _repeat(settings: ProbeSettings, unit: str, call: Callable[[], None]) -> ProbeResult:
    call()
    ready = time.monotonic()
    if settings.barrier is not None:
        _meet(*settings.barrier)
    began = time.monotonic()
    taken: list[float] = []
    ends = time.perf_counter() + settings.seconds
    while time.perf_counter() < ends:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return ProbeResult(
        kind=settings.kind,
        compute_units=settings.compute_units,
        compute_unit=unit,
        calls=len(taken),
        per_second=len(taken) / sum(taken),
        slowest_ms=1e3 * max(taken),
        ready_s=ready,
        began_s=began,
    )


def _meet(reading: int, writing: int) -> None:
    """Wait for the others: the pipe ends when no process holds its write end any longer.

    Raises:
        RuntimeFailure: the others were not ready in time.
    """
    os.close(writing)
    if not select.select([reading], [], [], _MEETING_S)[0]:
        raise RuntimeFailure(f"the other probe was not ready within {_MEETING_S:g} s")


def _draft_loop(settings: ProbeSettings) -> ProbeResult:
    """Feed single tokens through the package in a loop."""
    model = _model(settings)
    state, feed = model.new_state(), chain_feed([1], 0, model.slots)
    return _repeat(
        settings, model.executor.compute_unit, lambda: discard(model.run("decode", feed, state))
    )


def _target_loop(settings: ProbeSettings) -> ProbeResult:
    """Feed single tokens through the MLX target in a loop."""
    # MLX must be imported after the BLAS is in place.
    import mlx.core as mx  # noqa: PLC0415

    from services.kernels.register import kernels  # noqa: PLC0415
    from services.kv.cache import KVStore  # noqa: PLC0415
    from services.mlx.loader import (  # noqa: PLC0415
        load,
        windows_of,
    )

    module = load(Path(settings.target)).module
    store = KVStore(windows_of(module), bucketed=False)

    def call() -> None:
        store.trim(0)
        store.chain(1)
        mx.eval(module(mx.array([[1]]), cache=store.caches))

    return _repeat(settings, kernels().device, call)


def _injection(settings: ProbeSettings) -> ProbeResult:
    """Write a prompt's rows into the cache of a model like the target, in chunks."""
    import mlx.core as mx  # noqa: PLC0415

    from services.coreml.external_prefill import KVInjection, kv_dtype  # noqa: PLC0415
    from services.kernels.register import kernels  # noqa: PLC0415
    from services.kv.rewinding import find_rewinding  # noqa: PLC0415
    from services.mlx.loader import load  # noqa: PLC0415

    module = load(Path(settings.target)).module
    make_state = find_rewinding(module, bucketed=False).make
    dtype = mx.float16 if settings.half else kv_dtype(module, make_state)
    shape = read_architecture(Path(settings.target))
    # Float32 arrays, as CoreML's Python API and the reference runtime return them.
    rows = np.ones((shape.layers, shape.kv_heads, _CHUNK, shape.head_dim), np.float32)
    writing, handing = [], []
    for _ in range(settings.calls + 1):
        state, landing = make_state(), KVInjection(_INJECTED, dtype)
        started = time.perf_counter()
        for _ in range(_INJECTED // _CHUNK):
            landing.write(rows, rows)
        written = time.perf_counter()
        landing.hand_over(state)
        state.evaluate()
        writing.append(1e3 * (written - started))
        handing.append(1e3 * (time.perf_counter() - written))
    return ProbeResult(
        kind="injection",
        compute_units="",
        compute_unit=kernels().device,
        tokens=_INJECTED,
        dtype=str(dtype).removeprefix("mlx.core."),
        milliseconds=statistics.median(handing[1:]),
        written_ms=statistics.median(writing[1:]),
    )


def _prefill(settings: ProbeSettings) -> ProbeResult:
    """Time prompts of rising length by the MLX target, and by its package into its cache."""
    from services.coreml.external_prefill import ExternalPrefill  # noqa: PLC0415
    from services.coreml.prefill import open_prefill  # noqa: PLC0415
    from services.kv.rewinding import find_rewinding  # noqa: PLC0415
    from services.mlx.loader import load  # noqa: PLC0415

    folder = Path(settings.target)
    module = load(folder).module
    other = open_prefill(Path(settings.model), settings.compute_units, folder)
    make_state = find_rewinding(module, bucketed=False).make
    both = ExternalPrefill(
        module, make_state, other, whenever_it_fits=False, budget_s=settings.seconds
    )
    return ProbeResult(
        kind="prefill",
        compute_units=settings.compute_units,
        compute_unit=other.compute_unit,
        prefills=[
            PrefillTime(tokens=tokens, mlx_ms=own, coreml_ms=external)
            for tokens, (own, external) in both.times.items()
        ],
    )


def discard(_: object) -> None:
    """Discard the result of a call."""


if __name__ == "__main__":
    sys.exit(run_child("probe", ProbeSettings, run))
