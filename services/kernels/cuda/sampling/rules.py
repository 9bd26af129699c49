"""Sampling rules of tokens, encoded in a few words that a kernel can read."""

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.gumbel import position_keys
from protocol.decoding.sampling_params import is_greedy
from protocol.messages import Sampling

WORDS = 6
"""The lower and the upper key of the noise, temperature (0: greedy), top-k, top-p and min-p.

The layout is `Rule` of services/kernels/cuda/sampling/rule.cuh.
"""

APPLIED = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})
"""Fields of `Sampling` that rules encode."""


def write_rules(positions: npt.ArrayLike, sampling: Sampling) -> npt.NDArray[np.uint32]:
    """Return [..., WORDS] for positions [...], the absolute position of each token to be chosen."""
    where = np.asarray(positions, np.int64)
    rules = np.zeros((*where.shape, WORDS), np.uint32)
    temperature = 0.0 if is_greedy(sampling) else sampling.temperature
    shares = np.array([temperature, sampling.top_p, sampling.min_p], np.float32)
    rules[..., [2, 4, 5]] = shares.view(np.uint32)
    rules[..., 3] = sampling.top_k
    if temperature:
        distinct, places = np.unique(where, return_inverse=True)
        keys = np.array(position_keys(sampling.seed, distinct.tolist()), np.uint32)
        rules[..., :2] = keys.T[places.reshape(where.shape)]
    return rules


def read_noise(rules: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return the keys and the temperature of rules [rows, WORDS], each [rows, 1]."""
    temperature: Any = rules[:, 2:3].view(mx.float32)
    return rules[:, 0:1], rules[:, 1:2], temperature
