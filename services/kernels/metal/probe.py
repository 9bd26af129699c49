"""Self-test of a kernel when a model is loaded: is it correct, and faster than MLX's own?"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from protocol.jobs.kernel_report import KernelName, KernelProbe
from services.kernels.metal import attention, product
from services.kernels.metal.product import MOST_ROWS, Quantised
from services.mlx.selftest import UNTIMED, Way, check, time_in_turn
from services.runtime.preparation import run_all

_log = logging.getLogger(__name__)

TIMED_ROWS = (1, 2, 4, 8, 16)
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

Ways = tuple[Callable[[], list[mx.array]], Callable[[], list[mx.array]]]
"""MLX's calls and ours."""


class AttentionKind(NamedTuple):
    """Properties of a model's attention that determine its speed."""

    heads: int
    kv_heads: int
    size: int
    dtype: mx.Dtype


class _Comparison(NamedTuple):
    """A part of a kernel's self-test, as for `selftest.check`."""

    operation: str
    usual: Way
    ours: Way
    inputs: list[tuple[Any, ...]]


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

    def time(rows: int) -> Ways:
        x = _normal((rows, groups * size), dtype)
        return (
            lambda: [_by_mlx(x, layer) for layer in chosen],
            lambda: [product.multiply(x, layer) for layer in chosen],
        )

    x = _normal((MOST_ROWS, groups * size), dtype)
    counts = [(count,) for count in range(1, MOST_ROWS)]
    comparisons = (
        _Comparison("product", _by_mlx, product.multiply, [(x, layers[0])]),
        _Comparison(
            "bits",
            lambda n: product.multiply(x, layers[0])[:n],
            lambda n: product.multiply(x[:n], layers[0]),
            counts,
        ),
    )
    return _judge("product", shape, comparisons, time, always=always)


def _by_mlx(x: mx.array, weights: Quantised) -> mx.array:
    return mx.quantized_matmul(
        x, weights.weight, weights.scales, weights.biases,
        transpose=True, group_size=weights.group_size, bits=weights.bits,
    )  # fmt: skip


def probe_attention(shape: AttentionKind, *, always: bool) -> KernelProbe:
    """Test attention of this shape."""
    heads, kv_heads, size, dtype = shape
    words = f"{heads} heads of {size} over {kv_heads}, {_type(dtype)}"

    def time(rows: int) -> Ways:
        calls = [_attention_inputs(shape, rows, slots) for slots in _SLOTS]
        mask = None if rows == 1 else "causal"
        scale = size**-0.5
        return (
            lambda: [_attend_by_mlx(q, k, v, scale, mask) for q, k, v in calls],
            lambda: [attention.attend(q, k, v, scale, mask) for q, k, v in calls],
        )

    return _judge("attention", words, _compare_attention(shape), time, always=always)


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


def _compare_attention(shape: AttentionKind) -> list[_Comparison]:
    """Compare chains and trees in one chunk of keys and in several; then row by row."""
    count, inputs = 7, list[tuple[Any, ...]]()
    for slots in (70, 600):
        q, k, v = _attention_inputs(shape, count, slots)
        ends = mx.array([[slots - 3 * (i % 3)] for i in range(count)])
        inputs += [(q, k, v, 0.1, mask) for mask in ("causal", mx.arange(slots)[None] < ends)]

    def attend_in_chain(row: int) -> mx.array:
        return attention.attend(q, k, v, 0.1, "causal")[:, :, row]

    def attend_alone(row: int) -> mx.array:
        end, rows = slots - count + row + 1, slice(row, row + 1)
        return attention.attend(q[:, :, rows], k[..., :end, :], v[..., :end, :], 0.1, None)[:, :, 0]

    return [
        _Comparison("attention", _attend_by_mlx, attention.attend, inputs),
        _Comparison("bits", attend_in_chain, attend_alone, [(row,) for row in range(count)]),
    ]


def _judge(
    kernel: KernelName,
    shape: str,
    comparisons: Sequence[_Comparison],
    time: Callable[[int], Ways],
    *,
    always: bool,
) -> KernelProbe:
    what, distance = f"Metal {kernel}, {shape}", 0.0
    for comparison in comparisons:
        bits = comparison.operation == "bits"
        whole = f"{what}, bits of fewer rows" if bits else what
        verdict = run_all(check(whole, *comparison, share=UNTIMED))
        distance = max(distance, verdict.distance)
        if not verdict.right:
            reason = "a row's bits depend on the other rows" if bits else verdict.reason
            return KernelProbe(kernel=kernel, shape=shape, reason=reason, distance=distance)
    own, mlx = dict[int, float](), dict[int, float]()
    for rows in TIMED_ROWS:
        ways = time(rows)
        calls = len(ways[0]())
        mlx[rows], own[rows] = (1e3 * s / calls for s in run_all(time_in_turn(ways)))
    least, reason = (1, "") if always else choose_rows(own, mlx)
    shares = ", ".join(f"{rows}: {own[rows] / mlx[rows]:.2f}" for rows in own)
    used = f"used from {least} rows on" if least else "not used"
    said = f"{used}: {reason}" if reason else used
    _log.info("%s: %s; share of MLX's time by rows: %s", what, said, shares)
    return KernelProbe(
        kernel=kernel, shape=shape, least_rows=least, reason=reason, distance=distance,
        own_ms=own, mlx_ms=mlx,
    )  # fmt: skip


def choose_rows(own: dict[int, float], mlx: dict[int, float]) -> tuple[int, str]:
    """Return the fewest rows for which the kernel is used, given both times by rows, and why."""
    shares = {rows: own[rows] / mlx[rows] for rows in sorted(own)}
    for least, share in shares.items():
        served = [one for rows, one in shares.items() if rows >= least]
        if share <= _FEWEST and sum(served) <= _WORTHWHILE * len(served):
            return least, "" if least == 1 else "fewer are faster by MLX"
    return 0, "it is not faster than MLX's"


def _normal(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, dtype, key=mx.random.key(seed))


def _type(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
