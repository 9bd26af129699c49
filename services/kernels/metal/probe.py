"""Self-test of a kernel when a model is loaded: is it correct, and faster than MLX's own?"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from protocol.jobs.kernel_report import KernelName, KernelProbe
from services.kernels.metal import attention, product
from services.kernels.metal.product import MOST_ROWS, Quantised
from services.mlx.tracing.trace_trial import measure_distance

_log = logging.getLogger(__name__)

TIMED_ROWS = (1, 2, 4, 8, 16)
_TOLERANCE = 0.01
"""Relative; half precision rounds the result to steps of .001 (float16) or .008 (bfloat16)."""
_TRIALS = 5
"""Repetitions, of which the fastest counts."""
_CALLS = 8
"""Calls at once, so that launches cost as much as in a pass."""
_WORTHWHILE = 0.95
"""Share of MLX's time that the kernel may take on average for the rows it serves."""
_FEWEST = 1.05
"""The same for the fewest of them.

If that is one row, it is the slowdown of plain decoding that bits equal to a verification's may
cost.
"""
_SLOTS = (256, 4096)
"""Numbers of keys for which attention is timed."""

Calls = Callable[[], list[mx.array]]


class AttentionKind(NamedTuple):
    """Properties of a model's attention that determine its speed."""

    heads: int
    kv_heads: int
    size: int
    dtype: mx.Dtype


class _Comparison(NamedTuple):
    distance: float
    same_bits: bool
    """True if a row's bits are the same in any batch."""


def probe_product(layers: Sequence[Quantised], *, always: bool) -> KernelProbe:
    """Test the product of layers of one shape.

    Args:
        layers: several, so that their weights do not stay in a cache.
        always: True to use it wherever it is correct.
    """
    outputs, groups = layers[0].scales.shape
    bits, size = layers[0].bits, layers[0].group_size
    dtype = layers[0].scales.dtype
    shape = f"{groups * size} to {outputs}, {bits} bits, groups of {size}, {_type(dtype)}"
    chosen = [layers[i % len(layers)] for i in range(_CALLS)]

    def times(rows: int) -> tuple[Calls, Calls]:
        x = _normal((rows, groups * size), dtype)
        return (
            lambda: [product.multiply(x, layer) for layer in chosen],
            lambda: [_by_mlx(x, layer) for layer in chosen],
        )

    return _judge("product", shape, lambda: _compare_product(layers[0]), times, always=always)


def _by_mlx(x: mx.array, weights: Quantised) -> mx.array:
    return mx.quantized_matmul(
        x, weights.weight, weights.scales, weights.biases,
        transpose=True, group_size=weights.group_size, bits=weights.bits,
    )  # fmt: skip


def _compare_product(weights: Quantised) -> _Comparison:
    inputs = weights.scales.shape[1] * weights.group_size
    x = _normal((MOST_ROWS, inputs), weights.scales.dtype)
    products = product.multiply(x, weights)
    expected = _by_mlx(x, weights)
    same = [
        mx.array_equal(product.multiply(x[:n], weights), products[:n]).item()
        for n in range(1, MOST_ROWS)
    ]
    return _Comparison(measure_distance(expected, products), all(same))


def probe_attention(shape: AttentionKind, *, always: bool) -> KernelProbe:
    """Test attention of this shape."""
    heads, kv_heads, size, dtype = shape
    words = f"{heads} heads of {size} over {kv_heads}, {_type(dtype)}"

    def times(rows: int) -> tuple[Calls, Calls]:
        calls = [_attention_inputs(shape, rows, slots) for slots in _SLOTS]
        mask = None if rows == 1 else "causal"
        scale = size**-0.5
        return (
            lambda: [attention.attend(q, k, v, scale, mask) for q, k, v in calls],
            lambda: [_attend_by_mlx(q, k, v, scale, mask) for q, k, v in calls],
        )

    return _judge("attention", words, lambda: _compare_attention(shape), times, always=always)


def _attention_inputs(
    shape: AttentionKind, rows: int, slots: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Return inputs laid out like a model's: adjacent heads, slots of larger buffers."""
    heads, kv_heads, size, dtype = shape
    queries = _normal((1, rows, heads, size), dtype).swapaxes(1, 2)
    keys, values = (
        _normal((1, kv_heads, slots + 40, size), dtype, seed)[..., :slots, :] for seed in (1, 2)
    )
    mx.eval(queries, keys, values)
    return queries, keys, values


def _attend_by_mlx(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def _compare_attention(shape: AttentionKind) -> _Comparison:
    """Compare chains and trees in one chunk of keys and in several; then row by row."""
    count, distances = 7, []
    for slots in (70, 600):
        q, k, v = _attention_inputs(shape, count, slots)
        ends = mx.array([[slots - 3 * (i % 3)] for i in range(count)])
        for mask in ("causal", mx.arange(slots)[None] < ends):
            out = attention.attend(q, k, v, 0.1, mask)
            distances.append(measure_distance(_attend_by_mlx(q, k, v, 0.1, mask), out))
    together, same = attention.attend(q, k, v, 0.1, "causal"), []
    for row in range(count):
        end = slots - count + row + 1
        alone = attention.attend(
            q[:, :, row : row + 1], k[..., :end, :], v[..., :end, :], 0.1, None
        )
        same.append(mx.array_equal(alone[:, :, 0], together[:, :, row]).item())
    return _Comparison(max(distances), all(same))


def _judge(
    kernel: KernelName,
    shape: str,
    compare: Callable[[], _Comparison],
    times: Callable[[int], tuple[Calls, Calls]],
    *,
    always: bool,
) -> KernelProbe:
    try:
        distance, same_bits = compare()
        if not (distance < _TOLERANCE and same_bits):
            bits = "" if same_bits else " and a row's bits depend on the other rows"
            reason = f"its result is {distance:.2g} from MLX's{bits}"
            return _report(
                KernelProbe(kernel=kernel, shape=shape, reason=reason, distance=distance)
            )
        own, mlx = dict[int, float](), dict[int, float]()
        for rows in TIMED_ROWS:
            ours, theirs = times(rows)
            own[rows], mlx[rows] = _time(ours), _time(theirs)
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        reason = f"it does not run here: {error}"
        return _report(KernelProbe(kernel=kernel, shape=shape, reason=reason))
    least, reason = (1, "") if always else choose_rows(own, mlx)
    return _report(
        KernelProbe(
            kernel=kernel, shape=shape, least_rows=least, reason=reason, distance=distance,
            own_ms=own, mlx_ms=mlx,
        )
    )  # fmt: skip


def choose_rows(own: dict[int, float], mlx: dict[int, float]) -> tuple[int, str]:
    """Return the fewest rows for which the kernel is used, given both times by rows, and why."""
    shares = {rows: own[rows] / mlx[rows] for rows in sorted(own)}
    for least, share in shares.items():
        served = [one for rows, one in shares.items() if rows >= least]
        if share <= _FEWEST and sum(served) <= _WORTHWHILE * len(served):
            return least, "" if least == 1 else "fewer are faster by MLX"
    return 0, "it is not faster than MLX's"


def _report(probe: KernelProbe) -> KernelProbe:
    what = f"Metal {probe.kernel}, {probe.shape}"
    if probe.own_ms:
        used = f"used from {probe.least_rows} rows on" if probe.least_rows else "not used"
        shares = [f"{probe.own_ms[rows] / probe.mlx_ms[rows]:.2f}" for rows in probe.own_ms]
        said = f"{used}: {probe.reason}" if probe.reason else used
        rows = ", ".join(map(str, probe.own_ms))
        _log.info("%s: %s; %s rows take %s of MLX's time", what, said, rows, ", ".join(shares))
    else:
        _log.warning("%s: not used: %s", what, probe.reason)
    return probe


def _time(calls: Calls) -> float:
    """Return the milliseconds of one of these calls."""
    mx.eval(calls())
    seconds = []
    for _ in range(_TRIALS):
        started = time.perf_counter()
        count = len(results := calls())
        mx.eval(results)
        seconds.append((time.perf_counter() - started) / count)
    return 1e3 * min(seconds)


def _normal(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, dtype, key=mx.random.key(seed))


def _type(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
