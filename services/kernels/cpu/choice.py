"""The target's choice of tokens on the CPU, by `c/choose.c`."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.decoding.gumbel import position_keys
from protocol.decoding.sampling_params import is_greedy
from protocol.messages import Sampling
from services.mlx.blas import cpu_kernels


class _Rule(ctypes.Structure):
    """`struct rule` of `c/choose.c`."""

    _fields_ = (
        ("top_k", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("top_p", "min_p", "temperature")),
    )


def choose_tokens(
    logits: npt.NDArray[np.float32], positions: Sequence[int], sampling: Sampling
) -> npt.NDArray[np.int32] | None:
    """Choose one token per row, like `sampling.device.begin`; None without our kernels.

    Args:
        logits: [rows, vocabulary].
        positions: [rows] the absolute position that each chosen token will have; greedy sampling
            ignores them.
    """
    kernels: Any = cpu_kernels()
    rows, count = logits.shape
    if kernels is None or logits.dtype != np.float32 or logits.strides[1] != logits.itemsize:
        return None
    greedy = is_greedy(sampling)
    keys = np.zeros((rows, 2), np.uint32)
    if not greedy:
        keys[:] = np.array(position_keys(sampling.seed, positions), np.uint32).T
    temperature = 0.0 if greedy else sampling.temperature
    rule = _Rule(min(sampling.top_k, count), sampling.top_p, sampling.min_p, temperature)
    tokens = np.empty(rows, np.int32)
    kernels.choose_rows(
        rows, count, ctypes.c_void_p(logits.ctypes.data),
        ctypes.c_long(logits.strides[0] // logits.itemsize), ctypes.byref(rule),
        ctypes.c_void_p(keys.ctypes.data), ctypes.c_void_p(tokens.ctypes.data),
    )  # fmt: skip
    return tokens
