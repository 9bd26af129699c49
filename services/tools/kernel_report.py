"""`python -m services.tools.kernel_report SETTINGS`: report on our few-row kernels on this GPU.

They are tested with the target's own layers. On Metal only these are read, unless whole passes are
timed.
"""

import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from protocol.errors import ModelError
from protocol.jobs.kernel_report import KernelReport, KernelReportSettings
from protocol.process.child import run_reporting_errors
from protocol.settings import decode_settings
from services.engine.target_model import prepare
from services.kernels.cuda.blocks import equip_for_cuda
from services.kernels.metal import attention
from services.kernels.metal.choice import use_kernels
from services.kernels.metal.probe import AttentionKind
from services.kernels.metal.product import MOST_ROWS
from services.kernels.register import kernels
from services.kv.state import SequenceState
from services.mlx.fused_linear import fuse_linears
from services.mlx.loader import load
from services.runtime.preparation import run_all

_CONTEXT = 512
_TRIALS = 5
"""Repetitions, of which the fastest counts."""


def measure(settings: KernelReportSettings) -> KernelReport:
    """Test the kernels as the settings say; raises ModelError if the model does not load."""
    if kernels().device == "cuda":
        return _measure_on_cuda(settings)
    if not kernels().on_gpu:
        return KernelReport(note="there is no GPU here")
    if settings.passes:
        return _measure_passes(settings)
    try:
        loaded: Any = load_model(Path(settings.model), lazy=True)
    # mlx-lm and MLX raise errors of any kind for a broken folder.
    except Exception as error:
        raise ModelError(f"cannot load the model {settings.model!r}: {error}") from error
    module, config = loaded
    used = run_all(use_kernels(module, settings.kernels))
    shape = _attention_shape(module, config)
    if shape is not None:
        used.try_attention(shape)
    return used.report()


def _measure_on_cuda(settings: KernelReportSettings) -> KernelReport:
    module = load(Path(settings.model)).module
    fuse_linears(module)
    probes = run_all(equip_for_cuda(module))
    if not probes:
        return KernelReport(note="the target's products go through MLX: not in half precision")
    return KernelReport(probes=probes)


def _attention_shape(module: Any, config: dict[str, Any]) -> AttentionKind | None:
    """Return the attention shape if the configuration has the usual keys."""
    own = config.get("text_config") or config
    heads, width = own.get("num_attention_heads"), own.get("hidden_size")
    parameters: Any = tree_flatten(module.parameters())
    types = [array.dtype for _, array in parameters if array.dtype in attention.TYPES]
    if not heads or not width or not types:
        return None
    kv_heads = own.get("num_key_value_heads") or heads
    return AttentionKind(heads, kv_heads, own.get("head_dim") or width // heads, types[0])


def _measure_passes(settings: KernelReportSettings) -> KernelReport:
    """Return the probes' results, then times of whole passes by MLX and by all correct kernels."""
    module = load(Path(settings.model)).module
    states = prepare(module).states
    used = run_all(use_kernels(module, settings.kernels))
    # Attention is probed on first use.
    state = states.make()
    state.append(3)
    mx.eval(module(mx.array([[1, 2, 3]]), cache=state.caches))
    probes = used.report()
    if states.way not in ("slots", "windows"):
        return probes
    run_all(use_kernels(module, "off"))
    alone = _time_passes(module, states.make())
    run_all(use_kernels(module, "on"))
    ours = _time_passes(module, states.make())
    return msgspec.structs.replace(probes, pass_ms=alone, pass_with_kernels_ms=ours)


def _time_passes(module: Any, state: SequenceState) -> dict[int, float]:
    """Return the milliseconds of a verification after a prompt, by number of rows."""
    state.append(_CONTEXT)
    mx.eval(module(mx.arange(1, 1 + _CONTEXT)[None], cache=state.caches))
    state.commit(_CONTEXT)
    return {rows: _time_pass(module, state, rows) for rows in range(1, MOST_ROWS + 1)}


def _time_pass(module: Any, state: SequenceState, rows: int) -> float:
    seconds = []
    for _ in range(1 + _TRIALS):
        length = state.length
        started = time.perf_counter()
        state.append(rows)
        mx.eval(module(mx.array([[1] * rows]), cache=state.caches))
        seconds.append(time.perf_counter() - started)
        state.commit(length)
    return 1e3 * min(seconds[1:])


def _run() -> None:
    settings = decode_settings(sys.argv[1], KernelReportSettings)
    sys.stdout.write(msgspec.json.encode(measure(settings)).decode() + "\n")


if __name__ == "__main__":
    sys.exit(run_reporting_errors("kernel report", _run))
