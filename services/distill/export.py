"""Export the drafter to folders: one that mlx-lm loads, and one without the embedding.

The second, `carried/`, is for transport: `services.tools.build_drafter` adds the embedding of a
target that already exists at the destination.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten

from protocol.decoding.sampler import Ids
from protocol.errors import RuntimeFailure
from protocol.process.files import PUBLIC, atomic_writer
from services.distill.logits import Weights
from services.mlx.lm_head import FILE_NAME
from services.mlx.loader import LoadedModel

CARRIED = "carried"
_GROUP_SIZE = 32
"""Of quantised matrices: the CPU kernels' own."""

_SHARED = ("embed", "lm_head")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


class Trained(NamedTuple):
    """A fully trained drafter."""

    weights: Weights
    """The trained parameters."""
    config: dict[str, Any]
    """Its `config.json`."""
    head_ids: Ids | None


def export(out: Path, target: LoadedModel, drafter: Trained, bits: int = 0) -> None:
    """Write the drafter to `out` and, without the embedding, to `out/carried`.

    Args:
        target: the target, dense.
        bits: of the trained matrices; 0 leaves them in half precision.
    """
    original: dict[str, Any] = json.loads((target.folder / "config.json").read_text("utf-8"))
    named = original.get("torch_dtype", original.get("dtype"))
    half = mx.bfloat16 if named == "bfloat16" else mx.float16
    flat: Any = tree_flatten(target.module.parameters())
    shared = {name: a for name, a in flat if any(part in name for part in _SHARED)}
    carried = out / CARRIED
    try:
        carried.mkdir(parents=True, exist_ok=True)
        for folder, arrays, dtype in (
            (out, {**drafter.weights, **shared}, half),
            (carried, drafter.weights, mx.float16),
        ):
            config = drafter.config | ({"quantization": _describe_bits(bits)} if bits else {})
            halves = {name: array.astype(dtype) for name, array in arrays.items()}
            _write(folder, _quantise(halves, bits), config, drafter.head_ids)
        for name in _TOKENIZER_FILES:
            if (target.folder / name).is_file():
                shutil.copyfile(target.folder / name, out / name)
    except (OSError, RuntimeError) as error:
        raise RuntimeFailure(f"cannot write the drafter to {str(out)!r}: {error}") from error


def _describe_bits(bits: int) -> dict[str, Any]:
    return {"group_size": _GROUP_SIZE, "bits": bits}


def _quantise(weights: Weights, bits: int) -> Weights:
    """Return the weights with those matrices in bits that are not the target's."""
    if not bits:
        return weights
    result: Weights = {}
    for name, array in weights.items():
        if array.ndim != 2 or any(part in name for part in _SHARED):
            result[name] = array
            continue
        layer = name.removesuffix(".weight")
        parts = mx.quantize(array, **_describe_bits(bits))
        result |= zip((name, f"{layer}.scales", f"{layer}.biases"), parts, strict=True)
    return result


def _write(folder: Path, weights: Weights, config: dict[str, Any], head_ids: Ids | None) -> None:
    """Write the folder, weights last and atomically: a folder that has them is complete."""
    described = {key: value for key, value in config.items() if key != "dtype"}
    floats = next(a.dtype for a in weights.values() if mx.issubdtype(a.dtype, mx.floating))
    described["torch_dtype"] = str(floats).removeprefix("mlx.core.")
    (folder / "config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    head = folder / FILE_NAME
    if head_ids is None:
        head.unlink(missing_ok=True)
    else:
        head.write_bytes(msgspec.json.encode([int(token) for token in head_ids]))
    with atomic_writer(folder / "model.safetensors", mode=PUBLIC) as file:
        mx.save_safetensors(file, weights, {"format": "mlx"})
