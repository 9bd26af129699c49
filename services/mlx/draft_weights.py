"""The weights a drafter multiplies with: unchanged, or rounded to bytes.

A draft of few tokens at a time costs what reading the weights costs, and on a CPU drafter and
target slow down each other's reads. A drafter may round: its drafts are verified.

On a CPU products of few rows read int8 copies, one scale per row. Where the processor multiplies
bytes, the copies are interleaved accordingly, and the rows are rounded as well
(`cpu/products/int8_rows.c`). Prompts, whose products have many rows, keep using the floats. On
other devices MLX's own quantisation is used.
"""

import logging

import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from protocol.decoding.sampler import Floats
from protocol.settings import DraftWeights
from services.kernels.cpu.equip import equip
from services.mlx.blas import TILED_ROWS, WeightCopy, WeightKind, add_copy, multiplies_bytes
from services.mlx.exact_copies import add_exact_copies, large_weights
from services.mlx.loader import compute_unit
from services.mlx.rope import use_tables

_log = logging.getLogger(__name__)

_GROUP_SIZE = 64
_TILED_BYTES = 64
"""Consecutive bytes of a row: as in `cpu/products/tiles.h`."""


def use_weights(model: nn.Module, weights: DraftWeights) -> None:
    """Use these weights in the model; its results change by rounding."""
    if compute_unit() != "cpu":
        if weights == "int8":
            quantise_linears(model)
        return
    rounds = weights != "float"
    if equip(model, rounds=rounds, eight_bits=rounds):
        return
    use_tables(model)
    if not rounds:
        add_exact_copies(model)
    elif not add_int8_weights(model) and weights == "int8":
        _log.warning("the drafter multiplies with floats: its int8 weights need our CPU kernels")


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


def add_int8_weights(model: nn.Module) -> int:
    """Let products of few rows read int8 copies of the model's large weights.

    The weights must stay alive.

    Returns:
        The number of weights with a copy; 0 without our CPU kernels.
    """
    tiled = multiplies_bytes()
    return sum(add_copy(weight, int8_copy(weight, tiled=tiled)) for weight in large_weights(model))


def int8_copy(weight: Floats, *, tiled: bool) -> WeightCopy:
    """Copy a weight [n, k] to bytes; `tiled`: interleaved for products with rows of bytes."""
    rows, scales = round_to_int8(weight)
    if not tiled:
        return WeightCopy(WeightKind.ROUNDED_INT8, rows, scales)
    return WeightCopy(WeightKind.TILED_INT8, tile_rows(rows), scales)


def tile_rows(rows: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """Interleave [n, k] -> [n / 4, k / 64, 4, 64], zero-padded: a tile is contiguous."""
    n, k = rows.shape
    filled = np.pad(rows, ((0, -n % TILED_ROWS), (0, -k % _TILED_BYTES)))
    tiles = filled.reshape(-1, TILED_ROWS, filled.shape[1] // _TILED_BYTES, _TILED_BYTES)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3))


def round_to_int8(weight: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Round [rows, columns] to int8; return it with the [rows] scales to multiply by."""
    scales = (np.abs(weight).max(axis=1, initial=0.0) / 127.0).astype(np.float32)
    scales[scales == 0.0] = 1.0
    return np.rint(weight / scales[:, None]).astype(np.int8), scales
