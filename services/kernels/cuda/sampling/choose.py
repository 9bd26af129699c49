"""The target's choice of a token after each row of logits on CUDA, in one launch.

MLX needs a dozen launches, and sorts the whole row if there are filters. Here one block serves a
row, by the rule of `protocol.decoding.sampler`; cases that rounding could decide differently are
left to the host, as in `cpu/choose.c`. It is used if it matches the host.
"""

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from protocol.decoding.sampler import sample
from protocol.decoding.sampling_params import goes_beyond, is_greedy
from protocol.messages import Sampling
from services.kernels.cuda.kernel import LANES, build
from services.kernels.cuda.sampling.rules import APPLIED, write_rules
from services.mlx.selftest import is_right

_TYPES = (mx.float16, mx.bfloat16, mx.float32)
_WARPS = 32
_TRIAL = (
    Sampling(),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=0.8, seed=2, top_k=40, top_p=0.95, min_p=0.02),
)
_TRIAL_SHAPE = (4, 49152)

_BODY = """
choose_token<WARPS>(
    Row<T>{rows + blockIdx.x * rows_strides[0], long(rows_strides[1])}, rows_shape[1],
    rules + blockIdx.x * rules_shape[1], out + blockIdx.x);
"""


def choose_on_cuda(
    logits: mx.array, positions: Sequence[int], sampling: Sampling
) -> mx.array | None:
    """Choose one token per row, lazily; see `sampling.device.begin`. None if unsupported."""
    takes = logits.dtype in _TYPES and not goes_beyond(sampling, APPLIED)
    if not takes or not _works(logits.dtype):
        return None
    if is_greedy(sampling):
        return launch(logits, _greedy_rules(logits.shape[0]))
    return launch(logits, mx.array(write_rules(positions, sampling)))


@functools.cache
def _greedy_rules(rows: int) -> mx.array:
    return mx.array(write_rules(range(rows), Sampling()))


def launch(rows: mx.array, rules: mx.array) -> mx.array:
    """Return [rows] int32 tokens by the kernel, or codes as from `sampling.device.begin`.

    Args:
        rows: [rows, vocabulary] logits.
        rules: [rows, WORDS], see `rules`.
    """
    count = rows.shape[0]
    texts = ("sampling/rule.cuh", "sampling/choose.cuh")
    make = build(texts, _BODY, ("rows", "rules"), contiguous=False)
    outputs: list[mx.array] = make(
        inputs=[rows, rules],
        template=[("T", rows.dtype), ("WARPS", _WARPS)],
        grid=(count * _WARPS * LANES, 1, 1),
        threadgroup=(_WARPS * LANES, 1, 1),
        output_shapes=[(count,)],
        output_dtypes=[mx.int32],
    )
    return outputs[0]


@functools.cache
def _works(dtype: mx.Dtype) -> bool:
    """Return True if the kernel compiles here, and matches the host."""
    rows = (3.0 * mx.random.normal(_TRIAL_SHAPE, key=mx.random.key(0))).astype(dtype)
    logits: Any = np.array(rows.astype(mx.float32))
    positions = list(range(_TRIAL_SHAPE[0]))

    def usual(sampling: Sampling) -> mx.array:
        return mx.array(sample(logits, positions, sampling))

    def ours(sampling: Sampling) -> mx.array:
        chosen = launch(rows, mx.array(write_rules(positions, sampling)))
        if not mx.any(chosen >= 0).item():
            raise ValueError("it leaves every row to the host")
        return mx.where(chosen < 0, usual(sampling), chosen)

    return is_right("the choice of tokens", "bits", usual, ours, [(one,) for one in _TRIAL])
