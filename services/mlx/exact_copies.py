"""Exact, smaller copies of a model's weights, read by products of few rows on a CPU.

Decoding there costs what reading the weights costs. On a CPU a model computes in 32-bit floats, but
one published in fewer bits has no more information than before: every weight is `number * step +
minimum` of its block of 32, with numbers of four or eight bits, or a 16-bit float. A copy is kept
only if it reproduces every weight (`cpu/products/exact_copy.c`), so that no product changes by a
bit. Without AVX-512, prompts, whose products have many rows, keep using the floats.
"""

import logging
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from services.kernels.cpu.equip import count_packed_bytes
from services.kernels.cpu.layers import PackedEmbedding
from services.mlx.blas import WeightCopy, WeightKind, add_copy, find_copy, pack_exactly
from services.mlx.loader import compute_unit

_log = logging.getLogger(__name__)

_LEAST_ELEMENTS = 65536
"""Smaller weights stay in the CPU's cache anyway."""

_EXACT = (
    WeightKind.FOUR_BITS,
    WeightKind.EIGHT_BITS,
    WeightKind.BFLOAT16,
    WeightKind.FLOAT16,
)
"""Kinds of copies, smallest first."""


def add_exact_copies(model: nn.Module) -> int:
    """Let products of few rows read exact copies of the model's large weights.

    The weights must stay alive.

    Returns:
        The number of weights with a copy.
    """
    copies = [copy for weight in large_weights(model) if (copy := _add_copy(weight))]
    if copies:
        size = sum(copy.nbytes for copy in copies)
        kinds = ", ".join(sorted({copy.kind.name.lower() for copy in copies}))
        _log.info("%d weights have exact copies of %.2f GB (%s)", len(copies), size / 1e9, kinds)
    return len(copies)


def count_read_bytes(model: nn.Module) -> int:
    """Return the bytes that a pass over few tokens reads: a copy's in place of its weight's."""
    arrays: Any = tree_flatten(model.parameters())
    whole: int = sum(array.nbytes for _, array in arrays)
    if compute_unit() != "cpu":
        return whole
    copied = [(weight, find_copy(weight)) for weight in large_weights(model)]
    saved = sum(weight.nbytes - copy.nbytes for weight, copy in copied if copy is not None)
    return whole - saved + count_packed_bytes(model)


def large_weights(model: nn.Module) -> Iterator[npt.NDArray[np.float32]]:
    """Return the matrices that rows are multiplied with, [outputs, inputs], in memory order.

    These are linear layers and the head; small ones, and types other than float32, are skipped.
    """
    weights = [layer.weight for layer in model.modules() if type(layer) is nn.Linear]
    inner: Any = getattr(model, "model", None)
    embedding: Any = getattr(inner, "embed_tokens", None)
    if (
        not isinstance(embedding, PackedEmbedding)
        and embedding is not None
        and getattr(model, "lm_head", None) is None
    ):
        weights.append(embedding.head if hasattr(embedding, "head") else embedding.weight)
    for weight in weights:
        if weight.dtype == mx.float32 and weight.ndim == 2 and weight.size >= _LEAST_ELEMENTS:
            mx.eval(weight)
            yield np.array(weight, copy=False)


def _add_copy(weight: npt.NDArray[np.float32]) -> WeightCopy | None:
    for kind in _EXACT:
        copy = pack_exactly(weight, kind)
        if copy is not None:
            return copy if add_copy(weight, copy) else None
    return None
