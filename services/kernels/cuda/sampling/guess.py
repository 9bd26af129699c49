"""A drafter's guesses of the target's choice after each row, on CUDA, in one launch.

MLX needs a dozen launches, more with filters, and a depth of a small drafter waits for each. Here
one block serves a row. The self-test compares it with the host's results, not MLX's: those
operations would need kernels that take seconds each to compile.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from protocol.messages import Sampling
from services.kernels.cuda.kernel import LANES, build
from services.kernels.cuda.sampling.rules import write_rules
from services.mlx.selftest import is_right

GREEDY, DRAWN, FILTERED = 0, 1, 2
"""Kinds of rules: without noise, with noise, and with filters that drop candidates."""

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
__shared__ Best<1, KIND> best;
const uint32_t* rule = rules + blockIdx.x * rules_shape[1];
const Row<T> row{rows + blockIdx.x * rows_strides[0], long(rows_strides[1])};
scan_columns<1, KIND, WARPS>(row, 0, rows_shape[1], ids, rule, best);
name_tokens<1, KIND>(best, ids, rule, tokens + blockIdx.x, found + blockIdx.x,
                     found + rows_shape[0] + blockIdx.x);
"""

Host = Callable[[Any, list[int], Any, Sampling], tuple[Any, Any]]
"""(logits, positions, ids, sampling) -> [rows] tokens and [rows] confidences."""


def guess_tokens(
    rows: mx.array, ids: mx.array, rules: mx.array, kind: int, host: Host
) -> Guesses | None:
    """Compute `sampling.device.guess` by the kernel; None where it is not supported.

    Args:
        rows: [rows, head] logits.
        ids: [head] int32.
        rules: [rows, WORDS], see `rules`.
        kind: of the rules.
        host: the reference of the self-test.
    """
    fits = rows.dtype in _TYPES and rows.shape[1] >= CANDIDATES
    return launch(rows, ids, rules, kind) if fits and _works(rows.dtype, kind, host) else None


def launch(rows: mx.array, ids: mx.array, rules: mx.array, kind: int) -> Guesses:
    """Compute `guess_tokens` by the kernel."""
    count = rows.shape[0]
    texts = ("sampling/rule.cuh", "sampling/best.cuh", "sampling/guess.cuh")
    inputs, outputs = ("rows", "ids", "rules"), ("tokens", "found")
    make = build(texts, _BODY, inputs, contiguous=False, outputs=outputs)
    best, found = make(
        inputs=[rows, ids, rules],
        template=[("T", rows.dtype), ("KIND", kind), ("WARPS", _WARPS)],
        grid=(count * _WARPS * LANES, 1, 1),
        threadgroup=(_WARPS * LANES, 1, 1),
        output_shapes=[(count,), (2, count)],
        output_dtypes=[mx.int32, mx.float32],
    )
    return best, found


@functools.cache
def _works(dtype: mx.Dtype, kind: int, host: Host) -> bool:
    """Return True if the kernel compiles here, and matches the host."""
    sampling, (count, head) = _TRIAL[kind], _TRIAL_SHAPE
    random = np.random.default_rng(0)
    logits: Any = random.normal(-2.0, 1.0, _TRIAL_SHAPE)
    for row in logits:  # ties may come in any order: the best ones differ in any type
        row[random.permutation(head)[: 2 * CANDIDATES]] = 14.0 - np.arange(2 * CANDIDATES) / 16.0
    rows = mx.array(logits.astype(np.float32)).astype(dtype)
    ids, positions = np.arange(head)[::-1] + 7, list(range(count))
    logits = np.array(rows.astype(mx.float32))
    tokens, confidences = host(logits, positions, ids, sampling)

    def ours() -> mx.array:
        rules = mx.array(write_rules(positions, sampling))
        best, found = launch(rows, mx.array(ids.astype(np.int32)), rules, kind)
        if best.tolist() != tokens.tolist():
            raise ValueError("its tokens are not the host's")
        return found[1]

    return is_right("guesses of tokens", "guess", lambda: mx.array(confidences), ours)
