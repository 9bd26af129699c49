"""A drafter's guesses at what the target will choose after each row, on CUDA, in one launch.

MLX takes a dozen launches for them, more with filters, and a depth of a small drafter waits for
each. Here one block serves a row. Used if it guesses what MLX's operations do, and in less time.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from services.mlx.cuda.kernel import LANES, build
from services.mlx.trace_trial import measure_distance, pays, time_in_turn

_log = logging.getLogger(__name__)

GREEDY, DRAWN, FILTERED = 0, 1, 2
"""Whether there is noise, and whether filters drop some candidates."""

WIDTHS = (1, 5)
"""Numbers of guesses that there is a kernel for: the best one, with or without four runners-up."""
CANDIDATES = 64
"""`CANDIDATES` of guess.cuh."""
_TYPES = (mx.float16, mx.bfloat16, mx.float32)
_WARPS = 32
_TOLERANCE = 1e-3

Guesses = tuple[mx.array, mx.array]
"""See `sampling.device.guess`."""

_BODY = """
guess_tokens<WIDTH, KIND, WARPS>(
    Row<T>{rows + blockIdx.x * rows_strides[0], long(rows_strides[1])}, rows_shape[1], ids,
    rules + blockIdx.x * rules_shape[1], tokens + blockIdx.x, found + blockIdx.x * WIDTH,
    found + (rows_shape[0] + blockIdx.x) * WIDTH);
"""


class Wanted(NamedTuple):
    """Which guesses."""

    width: int
    """How many; few."""
    kind: int
    """What the rules ask for."""


def guess_tokens(
    rows: mx.array,
    ids: mx.array,
    rules: mx.array,
    wanted: Wanted,
    reference: Callable[[mx.array, int], Guesses],
) -> Guesses | None:
    """`sampling.device.guess` by the kernel; None where MLX's operations serve better.

    Args:
        rows: [rows, head] logits.
        ids: [head] int32.
        rules: [rows, WORDS], see `sampling.rules`.
        wanted: how many guesses, of which kind.
        reference: makes so many guesses for such rows, with these ids and rules, by MLX's
            operations; it is called before anything of this kind is traced.
    """
    width = next((count for count in WIDTHS if count >= wanted.width), 0)
    if rows.dtype not in _TYPES or not width or rows.shape[1] < CANDIDATES:
        return None
    made = Wanted(width, wanted.kind)
    key = rows.dtype, made
    if key not in _found_out:
        _found_out[key] = _try_out(rows, ids, rules, made, reference)
    if not _found_out[key]:
        return None
    best, found = launch(rows, ids, rules, made)
    return best, found[..., : wanted.width] if wanted.width < width else found


_found_out: dict[tuple[mx.Dtype, Wanted], bool] = {}


def launch(rows: mx.array, ids: mx.array, rules: mx.array, wanted: Wanted) -> Guesses:
    """`guess_tokens` for one of `WIDTHS`."""
    count, width = rows.shape[0], wanted.width
    texts = ("sampling/rule.cuh", "sampling/best.cuh", "sampling/guess.cuh")
    inputs, outputs = ("rows", "ids", "rules"), ("tokens", "found")
    make = build(texts, _BODY, inputs, contiguous=False, outputs=outputs)
    best, found = make(
        inputs=[rows, ids, rules],
        template=[("T", rows.dtype), ("WIDTH", width), ("KIND", wanted.kind), ("WARPS", _WARPS)],
        grid=(count * _WARPS * LANES, 1, 1),
        threadgroup=(_WARPS * LANES, 1, 1),
        output_shapes=[(count,), (2, count, width)],
        output_dtypes=[mx.int32, mx.float32],
    )
    return best, found


def _try_out(
    rows: mx.array,
    ids: mx.array,
    rules: mx.array,
    wanted: Wanted,
    reference: Callable[[mx.array, int], Guesses],
) -> bool:
    """Whether the kernel compiles here, guesses what MLX does of these rows, and is faster."""
    by_mlx = partial(reference, rows, wanted.width)
    by_us = partial(launch, rows, ids, rules, wanted)
    try:
        # Of equal scores either may come first; how sure they are is the same.
        distance = measure_distance(by_mlx()[1][1], by_us()[1][1])
        if not distance < _TOLERANCE:
            _log.warning("the kernel that guesses is %.2g from MLX's operations", distance)
            return False
        theirs, ours = time_in_turn([by_mlx, by_us])
    except (RuntimeError, ValueError, OSError) as error:
        _log.warning("the kernel that guesses does not run here: %s", error)
        return False
    said = "%d guesses: %.2f ms by our kernel, %.2f ms by MLX"
    _log.info(said, wanted.width, 1e3 * ours, 1e3 * theirs)
    return pays(ours, theirs)
