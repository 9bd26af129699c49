"""`python -m services.tools.build_drafter CARRIED TARGET FOLDER`: adds the target's embedding.

A distilled drafter is carried without its embedding table, which is the target's own and
would be most of its size, and perhaps in few bits. The assembled folder is an ordinary mlx-lm
model folder, dense, with the target's tokenizer.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from protocol.errors import ModelError
from services.mlx.target_reader import WEIGHTS

_EMBEDDING = "model.embed_tokens"
_SHARED = (_EMBEDDING, "lm_head")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def assemble(carried: Path, target: Path, folder: Path) -> None:
    """Write the draft model `folder`; raises ModelError if a part is missing."""
    weights = _dense_weights(carried)
    shared = _embedding_and_head(target)
    if f"{_EMBEDDING}.weight" not in shared:
        raise ModelError(f"the target {str(target)!r} has no tensor {_EMBEDDING}.weight")
    folder.mkdir(parents=True, exist_ok=True)
    for file in carried.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((carried / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if (carried / WEIGHTS).is_file():
        shutil.copyfile(carried / WEIGHTS, folder / WEIGHTS)
    for name in _TOKENIZER_FILES:
        try:
            shutil.copyfile(target / name, folder / name)
        except FileNotFoundError as error:
            raise ModelError(f"the target {str(target)!r} has no {name}") from error
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **shared}, {"format": "mlx"})


def _embedding_and_head(target: Path) -> dict[str, mx.array]:
    """The target's embedding and head, dense: an assembled drafter is not quantised."""
    weights = _weights(target)
    names = [f"{layer}.weight" for layer in _SHARED if f"{layer}.weight" in weights]
    return {name: _dense(target, weights, name) for name in names}


def _dense_weights(folder: Path) -> dict[str, mx.array]:
    """All weights of a folder, those that are quantised unpacked."""
    weights = _weights(folder)
    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    parts = {f"{layer}.{part}" for layer in packed for part in ("scales", "biases")}
    return {name: _dense(folder, weights, name) for name in weights if name not in parts}


def _dense(folder: Path, weights: dict[str, mx.array], name: str) -> mx.array:
    """A weight as it is, or in float16 if it is quantised."""
    layer = name.removesuffix(".weight")
    scales = weights.get(f"{layer}.scales")
    if scales is None or layer == name:
        return weights[name]
    shape = _quantization(folder, layer)
    biases = weights.get(f"{layer}.biases")
    return mx.dequantize(weights[name], scales, biases, **shape).astype(mx.float16)


def _quantization(folder: Path, layer: str) -> dict[str, Any]:
    """How a layer is quantised: its own entry in `config.json`, or the one for all."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    common: dict[str, Any] = config["quantization"]
    own = common.get(layer, common)
    return {key: own[key] for key in ("group_size", "bits", "mode") if key in own}


def _weights(folder: Path) -> dict[str, mx.array]:
    path = folder / "model.safetensors"
    try:
        loaded: Any = mx.load(str(path))
    except (RuntimeError, OSError) as error:
        raise ModelError(f"cannot read the weights {str(path)!r}: {error}") from error
    weights: dict[str, mx.array] = loaded
    return weights


def main() -> int:
    """The command line of this module; reports like a child of the supervisor."""
    try:
        carried, target, folder = map(Path, sys.argv[1:])
        assemble(carried, target, folder)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return ModelError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
