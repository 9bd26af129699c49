"""What a drafter multiplies with: its weights as they are, or rounded to bytes.

Where few tokens are drafted at a time a draft costs what reading the weights costs, and on a CPU
drafter and target slow down each other's reading. A drafter may round: its drafts are verified.

On a CPU products of few rows read int8 copies, one scale a row, and round the rows as well where
the processor multiplies bytes (`cpu/products/int8_rows.c`). Prompts, whose products have many
rows, go on with the floats. Elsewhere MLX's own quantisation is used.
"""

import logging

import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from protocol.decoding.sampler import Floats
from protocol.settings import DraftWeights
from services.mlx.blas import WeightCopy, WeightKind, add_copy
from services.mlx.exact_copies import add_exact_copies, large_weights
from services.mlx.loader import compute_unit

_log = logging.getLogger(__name__)

_GROUP_SIZE = 64


def use_weights(model: nn.Module, weights: DraftWeights) -> None:
    """Let the model multiply with these; what it computes changes by rounding."""
    if compute_unit() != "cpu":
        if weights == "int8":
            quantise_linears(model)
    elif weights == "float":
        add_exact_copies(model)
    elif not add_int8_weights(model) and weights == "int8":
        _log.warning("the drafter multiplies with floats: its int8 weights need our CPU kernels")


def quantise_linears(model: nn.Module) -> None:
    """Replace the linear layers by 8-bit ones, where their size allows it."""
    nn.quantize(
        model,
        group_size=_GROUP_SIZE,
        bits=8,
        class_predicate=lambda _, layer: (
            type(layer) is nn.Linear and layer.weight.shape[1] % _GROUP_SIZE == 0
        ),
    )


def add_int8_weights(model: nn.Module) -> int:
    """Let products of few rows read int8 copies of the model's large weights, which must stay.

    Returns:
        How many weights have one; 0 without our CPU kernels.
    """
    return sum(
        add_copy(weight, WeightCopy(WeightKind.ROUNDED_INT8, *round_to_int8(weight)))
        for weight in large_weights(model)
    )


def round_to_int8(weight: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """[rows, columns] -> the same as int8, and the [rows] scales to multiply them with."""
    scales = (np.abs(weight).max(axis=1, initial=0.0) / 127.0).astype(np.float32)
    scales[scales == 0.0] = 1.0
    return np.rint(weight / scales[:, None]).astype(np.int8), scales
