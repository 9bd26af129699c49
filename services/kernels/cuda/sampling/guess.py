"""A drafter's guesses of the target's choice after each row, on CUDA, in one launch.

MLX needs a dozen launches, more with filters, and a depth of a small drafter waits for each. Here
one block serves a row. The self-test compares it with the host's results, not MLX's: those
operations would need kernels that take seconds each to compile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from protocol.messages import Sampling
from services.kernels.cuda.kernel import LANES, build
from services.kernels.cuda.sampling.rules import write_rules
from services.mlx.selftest import is_right

GREEDY, DRAWN, FILTERED = 0, 1, 2
"""Kinds of rules: without noise, with noise, and with filters that drop candidates."""

WIDTHS = (1, 5)
"""Numbers of guesses with a kernel: the best one, with or without four runners-up."""
CANDIDATES = 64
"""`CANDIDATES` of guess.cuh."""
_TYPES = (mx.float16, mx.bfloat16, mx.float32)
_WARPS = 32
_TRIAL = {
    GREEDY: Sampling(),
    DRAWN: Sampling(temperature=0.7, seed=1),
    FILTERED: Sampling(temperature=0.8, seed=2, top_k=40, top_p=0.95, min_p=0.02),
}
_TRIAL_SHAPE = (4, 16000)

Guesses = tuple[mx.array, mx.array]
"""See `sampling.device.guess`."""

_BODY = """
guess_tokens<WIDTH, KIND, WARPS>(
    Row<T>{rows + blockIdx.x * rows_strides[0], long(rows_strides[1])}, rows_shape[1], ids,
    rules + blockIdx.x * rules_shape[1], tokens + blockIdx.x, found + blockIdx.x * WIDTH,
    found + (rows_shape[0] + blockIdx.x) * WIDTH);
"""


class Wanted(NamedTuple):
    """The requested kind and number of guesses."""

    width: int
    """Number of guesses; small."""
    kind: int
    """Kind of the rules."""


Host = Callable[[Any, list[int], Any, Sampling, Wanted], tuple[Any, Any]]
"""(logits, positions, ids, sampling, wanted) -> [rows] tokens and [rows, width] confidences."""


def guess_tokens(
    rows: mx.array, ids: mx.array, rules: mx.array, wanted: Wanted, host: Host
) -> Guesses | None:
    """Compute `sampling.device.guess` by the kernel; None where it is not supported.

    Args:
        rows: [rows, head] logits.
        ids: [head] int32.
        rules: [rows, WORDS], see `rules`.
        wanted: number and kind of guesses; a kind must have been used before it is traced.
        host: the reference of the self-test.
    """
    width = next((count for count in WIDTHS if count >= wanted.width), 0)
    made = Wanted(width, wanted.kind)
    fits = rows.dtype in _TYPES and width and rows.shape[1] >= CANDIDATES
    if not fits or not _works(rows.dtype, made, host):
        return None
    best, found = launch(rows, ids, rules, made)
    return best, found[..., : wanted.width] if wanted.width < width else found


def launch(rows: mx.array, ids: mx.array, rules: mx.array, wanted: Wanted) -> Guesses:
    """Compute `guess_tokens` for one of `WIDTHS`."""
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


@functools.cache
def _works(dtype: mx.Dtype, wanted: Wanted, host: Host) -> bool:
    """Return True if the kernel compiles here, and matches the host."""
    sampling, (count, head) = _TRIAL[wanted.kind], _TRIAL_SHAPE
    random = np.random.default_rng(0)
    logits: Any = random.normal(-2.0, 1.0, _TRIAL_SHAPE)
    for row in logits:  # ties may come in any order: the best ones differ in any type
        row[random.permutation(head)[: 2 * CANDIDATES]] = 14.0 - np.arange(2 * CANDIDATES) / 16.0
    rows = mx.array(logits.astype(np.float32)).astype(dtype)
    ids, positions = np.arange(head)[::-1] + 7, list(range(count))
    logits = np.array(rows.astype(mx.float32))
    tokens, confidences = host(logits, positions, ids, sampling, wanted)

    def ours() -> mx.array:
        rules = mx.array(write_rules(positions, sampling))
        best, found = launch(rows, mx.array(ids.astype(np.int32)), rules, wanted)
        if best.tolist() != tokens.tolist():
            raise ValueError("its tokens are not the host's")
        return found[1]

    return is_right("guesses of tokens", "guess", lambda: mx.array(confidences), ours)
