"""Exact copies of a model's weights in less memory, which products of few rows on a CPU read.

Decoding there costs what reading the weights costs. On a CPU a model computes in floats of 32
bits, but one that was published in fewer has no more information than before: every weight is
`number * step + least` of its block of 32, with numbers of four or eight bits, or a float of
sixteen. A copy is kept only where each weight comes out of it as it was
(`cpu/products/exact_copy.c`), so that no product changes by a bit. Without AVX-512 prompts, whose
products have many rows, go on with the floats.
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
"""Smaller weights stay in the cache anyway."""

_EXACT = (
    WeightKind.FOUR_BITS,
    WeightKind.EIGHT_BITS,
    WeightKind.BFLOAT16,
    WeightKind.FLOAT16,
)
"""The smallest first."""


def add_exact_copies(model: nn.Module) -> int:
    """Let products of few rows read exact copies of the model's large weights, which must stay.

    Returns:
        How many weights have one.
    """
    copies = [copy for weight in large_weights(model) if (copy := _add_copy(weight))]
    if copies:
        size = sum(copy.nbytes for copy in copies)
        kinds = ", ".join(sorted({copy.kind.name.lower() for copy in copies}))
        _log.info("%d weights have exact copies of %.2f GB (%s)", len(copies), size / 1e9, kinds)
    return len(copies)


def count_read_bytes(model: nn.Module) -> int:
    """Bytes of weights that a pass over few tokens reads: a copy's in the place of its weight's."""
    arrays: Any = tree_flatten(model.parameters())
    whole: int = sum(array.nbytes for _, array in arrays)
    if compute_unit() != "cpu":
        return whole
    copied = [(weight, find_copy(weight)) for weight in large_weights(model)]
    saved = sum(weight.nbytes - copy.nbytes for weight, copy in copied if copy is not None)
    return whole - saved + count_packed_bytes(model)


def large_weights(model: nn.Module) -> Iterator[npt.NDArray[np.float32]]:
    """What rows are multiplied with, [outputs, inputs], as it lies in memory.

    Linear layers, and the head where it is not one of them; small ones, and what is no float32,
    are left out.
    """
    found = [layer.weight for layer in model.modules() if type(layer) is nn.Linear]
    inner: Any = getattr(model, "model", None)
    embedding: Any = getattr(inner, "embed_tokens", None)
    if (
        not isinstance(embedding, PackedEmbedding)
        and embedding is not None
        and getattr(model, "lm_head", None) is None
    ):
        found.append(embedding.head if hasattr(embedding, "head") else embedding.weight)
    for weight in found:
        if weight.dtype == mx.float32 and weight.ndim == 2 and weight.size >= _LEAST_ELEMENTS:
            mx.eval(weight)
            yield np.array(weight, copy=False)


def _add_copy(weight: npt.NDArray[np.float32]) -> WeightCopy | None:
    for kind in _EXACT:
        copy = pack_exactly(weight, kind)
        if copy is not None:
            return copy if add_copy(weight, copy) else None
    return None
