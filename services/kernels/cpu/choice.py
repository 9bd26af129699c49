"""The target's choice of tokens on the CPU, by `c/choose.c`."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from protocol.decoding.gumbel import position_keys
from protocol.decoding.sampling_params import goes_beyond, is_greedy
from protocol.messages import Sampling
from services.kernels.cpu.library import cpu_kernels, view

_APPLIED = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})
"""Fields of `Sampling` that the kernel applies."""


class _Rule(ctypes.Structure):
    """`struct rule` of `c/choose.c`."""

    _fields_ = (
        ("top_k", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("top_p", "min_p", "temperature")),
    )


def choose_on_cpu(
    logits: mx.array, positions: Sequence[int], sampling: Sampling
) -> mx.array | None:
    """Choose one token per row, like `sampling.device.begin`; None where it cannot.

    Args:
        logits: [rows, vocabulary].
        positions: [rows] the absolute position that each chosen token will have; greedy sampling
            ignores them.
    """
    library: Any = cpu_kernels()
    rule = _find_rule(sampling, logits.shape[1])
    if library is None or logits.dtype != mx.float32 or rule is None:
        return None
    mx.eval(logits)
    memory, (rows, count) = view(logits), logits.shape
    if memory.strides[1] != memory.itemsize:
        return None
    keys = np.zeros((rows, 2), np.uint32)
    if rule.temperature:
        keys[:] = np.array(position_keys(sampling.seed, positions), np.uint32).T
    tokens = np.empty(rows, np.int32)
    library.choose_rows(
        rows, count, ctypes.c_void_p(memory.ctypes.data),
        ctypes.c_long(memory.strides[0] // memory.itemsize), ctypes.byref(rule),
        ctypes.c_void_p(keys.ctypes.data), ctypes.c_void_p(tokens.ctypes.data),
    )  # fmt: skip
    return mx.array(tokens)


@lru_cache(maxsize=64)
def _find_rule(sampling: Sampling, count: int) -> _Rule | None:
    """Return the rule for rows of `count` logits; None if a field is not applied."""
    if goes_beyond(sampling, _APPLIED):
        return None
    temperature = 0.0 if is_greedy(sampling) else sampling.temperature
    return _Rule(min(sampling.top_k, count), sampling.top_p, sampling.min_p, temperature)
