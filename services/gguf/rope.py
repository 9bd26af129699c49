"""Scaling of RoPE for long contexts: from GGUF's metadata and tables to mlx-lm's config.json."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import ReaderTensor

from protocol.errors import ModelError
from services.gguf.file import GGUFFile

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""All models of Llama 3.1 to 3.3 have these; a file has only the table that they give."""


def rope_scaling(
    file: GGUFFile, tensors: Mapping[str, ReaderTensor], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """`rope_scaling` of config.json, or None; raises ModelError if mlx-lm cannot say it."""
    if "rope_freqs.weight" in tensors:
        return _llama3(_table(tensors["rope_freqs.weight"]), file, config)
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        return {
            "type": "longrope",
            "long_factor": _table(tensors["rope_factors_long.weight"]).tolist(),
            "short_factor": _table(tensors["rope_factors_short.weight"]).tolist(),
        }
    prefix = f"{file.architecture}.rope.scaling."
    kind, factor = file.value(prefix + "type", "none"), file.value(prefix + "factor", 0.0)
    if kind == "none" or not factor or factor == 1.0:
        return None
    if kind == "linear":
        return {"type": "linear", "rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        original = file.require(prefix + "original_context_length")
        return {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": int(original),
        }
    raise ModelError(f"{str(file.path)!r} scales RoPE by {kind!r}, which cannot be converted")


def _table(tensor: ReaderTensor) -> npt.NDArray[np.float64]:
    if tensor.data.dtype != np.float32:
        raise ModelError(f"the table {tensor.name!r} is not of 32-bit floats")
    return np.asarray(tensor.data, np.float64).ravel()


def _llama3(
    table: npt.NDArray[np.float64], file: GGUFFile, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The parameters of Llama 3 that give this table of divisors of the frequencies."""
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": float(table.max(initial=1.0)),
        **_LLAMA3,
    }
    size = 2 * len(table)
    lengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = scaling["original_max_position_embeddings"] / lengths
    smooth = np.clip((share - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    if not np.allclose(table, expected, rtol=1e-3):
        raise ModelError(
            f"{str(file.path)!r} scales RoPE by a table that is not Llama 3's; it cannot be "
            "converted"
        )
    return scaling
