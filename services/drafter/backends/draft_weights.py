"""The weights a drafter multiplies with: unchanged, or rounded to eight or four bits.

A draft of few tokens at a time costs what reading the weights costs. A drafter may round: its
drafts are verified. On a CPU our kernels multiply bytes; elsewhere MLX's own quantisation is used.
On CUDA launches cost more than reading: there a drafter has bfloat16, for which our kernels need
fewer.
"""

import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from protocol.settings import MANY_DRAFT_WEIGHTS, DraftWeights
from services.kernels.cpu.equip import equip
from services.kernels.register import kernels
from services.mlx.loader import to_dense
from services.mlx.rope import use_tables

_log = logging.getLogger(__name__)

_GROUP_SIZE = 64
_BITS = {"int8": 8, "int4": 4}
_MOST_BYTES = 1_000_000_000
"""Largest drafter whose weights become bfloat16 on CUDA."""


def use_weights(model: nn.Module, weights: DraftWeights) -> None:
    """Use these weights in the model; its results change by rounding."""
    if kernels().on_gpu:
        if weights in _BITS:
            quantise_linears(model, _BITS[weights])
        elif weights == "auto" and kernels().equip is not None:
            stored: Any = tree_flatten(model.parameters())
            if sum(array.nbytes for _, array in stored) <= _MOST_BYTES:
                to_dense(model, mx.bfloat16)
        return
    chosen = weights
    if weights == "auto":
        chosen = "int4" if _count_wide_weights(model) > MANY_DRAFT_WEIGHTS else "int8"
    bits = _BITS.get(chosen, 0)
    if not equip(model, rounds=bool(bits), bits=bits):
        if weights in _BITS:
            _log.warning("the drafter multiplies with floats: only our CPU kernels read bytes")
        use_tables(model)


def _count_wide_weights(model: nn.Module) -> int:
    """Return how many weights of linear layers have more than four bits."""
    count = 0
    for _, layer in model.named_modules():
        if type(layer) is nn.Linear:
            count += layer.weight.size
        elif type(layer) is nn.QuantizedLinear and layer.bits > _BITS["int4"]:
            count += layer.weight.size * 32 // layer.bits
    return count


def quantise_linears(model: nn.Module, bits: int) -> None:
    """Replace the linear layers by ones of 8 or 4 bits, where their size permits."""
    nn.quantize(
        model,
        group_size=_GROUP_SIZE,
        bits=bits,
        class_predicate=lambda _, layer: (
            type(layer) is nn.Linear and layer.weight.shape[1] % _GROUP_SIZE == 0
        ),
    )
