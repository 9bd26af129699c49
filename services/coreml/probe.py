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

from protocol.child import main
from protocol.errors import RuntimeFailure
from protocol.probing import Found, ProbeSettings
from services.coreml.architecture import read_architecture
from services.coreml.manifest import read_manifest
from services.coreml.model import ConvertedModel, chain_feed, open_model
from services.coreml.runtime.executor import ReferenceExecutor
from services.coreml.threads import limit
from services.machine import load_blas

_INJECTED = 512
_COMPARED = 64
_MEETING_S = 900.0
"""A first load compiles for minutes; half of what the door waits for a probe."""


def run(settings: ProbeSettings) -> None:
    """Measure, and say what was found."""
    load_blas(settings.threads)
    limit(settings.threads)
    measure = {
        "functions": _functions,
        "device": _device,
        "draft-loop": _draft_loop,
        "target-loop": _target_loop,
        "injection": _injection,
    }[settings.kind]
    sys.stdout.write(msgspec.json.encode(measure(settings)).decode() + "\n")


def _model(settings: ProbeSettings) -> ConvertedModel:
    return open_model(Path(settings.model), settings.compute_units)


def _functions(settings: ProbeSettings) -> Found:
    """Times of every function, and where it runs."""
    from services.coreml.costs import measure  # noqa: PLC0415

    model = _model(settings)
    return Found(
        kind="functions",
        compute_units=settings.compute_units,
        compute_unit=model.executor.compute_unit,
        costs=measure(model, settings.calls),
    )


def _device(settings: ProbeSettings) -> Found:
    """The same tokens on the device and on the reference runtime."""
    folder = Path(settings.model)
    device = _model(settings)
    reference = ConvertedModel(folder, ReferenceExecutor(folder, read_manifest(folder)))
    rng = np.random.default_rng(0)
    tokens = [int(token) for token in rng.integers(0, device.manifest.vocabulary_size, _COMPARED)]
    branches = device.manifest.function("tree").tokens
    found = []
    for model in (device, reference):
        state, tops = model.new_state(), []
        for start in range(0, _COMPARED, branches):
            part = tokens[start : start + branches]
            tops += model.run("tree", chain_feed(part, start, model.slots), state)
        found.append(tops)
    pairs = list(zip(*found, strict=True))
    return Found(
        kind="device",
        compute_units=settings.compute_units,
        compute_unit=device.executor.compute_unit,
        calls=len(pairs),
        same_best=float(np.mean([a.ids[0, 0] == b.ids[0, 0] for a, b in pairs])),
        worst_logit=max(abs(float(a.logits[0, 0] - b.logits[0, 0])) for a, b in pairs),
    )


def _looped(settings: ProbeSettings, unit: str, call: Callable[[], None]) -> Found:
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
    return Found(
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
    """Wait for the others: the pipe ends when nobody holds its writing end any more.

    Raises:
        RuntimeFailure: the others were not ready in time.
    """
    os.close(writing)
    if not select.select([reading], [], [], _MEETING_S)[0]:
        raise RuntimeFailure(f"the other probe was not ready within {_MEETING_S:g} s")


def _draft_loop(settings: ProbeSettings) -> Found:
    """Single tokens through the package, again and again."""
    model = _model(settings)
    state, feed = model.new_state(), chain_feed([1], 0, model.slots)
    return _looped(
        settings, model.executor.compute_unit, lambda: void(model.run("decode", feed, state))
    )


def _target_loop(settings: ProbeSettings) -> Found:
    """Single tokens through the MLX target, again and again."""
    # MLX must be imported after the BLAS is in place.
    import mlx.core as mx  # noqa: PLC0415

    from services.kv import KVStore, windows_of  # noqa: PLC0415
    from services.model import compute_unit, load  # noqa: PLC0415

    module = load(Path(settings.target)).module
    store = KVStore(windows_of(module), bucketed=False)

    def call() -> None:
        store.trim(0)
        store.chain(1)
        mx.eval(module(mx.array([[1]]), cache=store.caches))

    return _looped(settings, compute_unit(), call)


def _injection(settings: ProbeSettings) -> Found:
    """Arrays of a prompt's keys and values into the target's empty MLX cache."""
    from services.elsewhere import inject, kv_dtype  # noqa: PLC0415
    from services.kv import KVStore, windows_of  # noqa: PLC0415
    from services.model import compute_unit, load  # noqa: PLC0415

    module = load(Path(settings.target)).module
    windows = windows_of(module)
    dtype = kv_dtype(module, windows)
    shape = read_architecture(Path(settings.target))
    rows = np.zeros((shape.layers, shape.kv_heads, _INJECTED, shape.head_dim), np.float16)
    taken = []
    for _ in range(settings.calls + 1):
        store = KVStore(windows, bucketed=False)
        started = time.perf_counter()
        inject(store, (rows, rows), dtype)
        store.evaluate()
        taken.append(1e3 * (time.perf_counter() - started))
    return Found(
        kind="injection",
        compute_units="",
        compute_unit=compute_unit(),
        tokens=_INJECTED,
        milliseconds=statistics.median(taken[1:]),
    )


def void(_: object) -> None:
    """A call whose result nobody wants."""


if __name__ == "__main__":
    sys.exit(main("probe", ProbeSettings, run))
