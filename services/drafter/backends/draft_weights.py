"""The weights a drafter multiplies with: unchanged, or rounded to bytes.

A draft of few tokens at a time costs what reading the weights costs. A drafter may round: its
drafts are verified. On a CPU our kernels multiply bytes; elsewhere MLX's own quantisation is used.
"""

import logging

import mlx.nn as nn

from protocol.settings import DraftWeights
from services.kernels.cpu.equip import equip
from services.kernels.register import kernels
from services.mlx.rope import use_tables

_log = logging.getLogger(__name__)

_GROUP_SIZE = 64


def use_weights(model: nn.Module, weights: DraftWeights) -> None:
    """Use these weights in the model; its results change by rounding."""
    if kernels().on_gpu:
        if weights == "int8":
            quantise_linears(model)
        return
    rounds = weights != "float"
    if not equip(model, rounds=rounds, eight_bits=rounds):
        if weights == "int8":
            _log.warning("the drafter multiplies with floats: only our CPU kernels read bytes")
        use_tables(model)


def quantise_linears(model: nn.Module) -> None:
    """Replace the linear layers by 8-bit ones, where their size permits."""
    nn.quantize(
        model,
        group_size=_GROUP_SIZE,
        bits=8,
        class_predicate=lambda _, layer: (
            type(layer) is nn.Linear and layer.weight.shape[1] % _GROUP_SIZE == 0
        ),
    )
