"""`python -m services.tools.build_drafter CARRIED TARGET FOLDER`: add the target's embedding.

A distilled drafter is shipped without its embedding table, which is the target's own and would be
most of its size. The assembled folder is an ordinary mlx-lm model folder with the target's
tokenizer.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from protocol.errors import ModelError
from protocol.process.child import produce_folder

_EMBEDDING = "model.embed_tokens"
_SHARED = (_EMBEDDING, "lm_head")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def assemble(carried: Path, target: Path, folder: Path) -> None:
    """Write the draft model `folder`; raises ModelError if a part is missing."""
    weights, of_target = _weights(carried), _weights(target)
    shared = {name: a for name, a in of_target.items() if name.startswith(_SHARED)}
    if f"{_EMBEDDING}.weight" not in shared:
        raise ModelError(f"the target {str(target)!r} has no tensor {_EMBEDDING}.weight")
    folder.mkdir(parents=True, exist_ok=True)
    for file in carried.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    _describe_quantization(target, folder, [one for one in _SHARED if f"{one}.scales" in shared])
    for name in _TOKENIZER_FILES:
        try:
            shutil.copyfile(target / name, folder / name)
        except FileNotFoundError as error:
            raise ModelError(f"the target {str(target)!r} has no {name}") from error
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **shared}, {"format": "mlx"})


def _describe_quantization(target: Path, folder: Path, layers: list[str]) -> None:
    """Describe the bits of these layers, which stay as the target has them."""
    if not layers:
        return
    config, of_target = _read_config(folder), _read_config(target)["quantization"]
    common = {key: of_target[key] for key in ("group_size", "bits", "mode") if key in of_target}
    carried = config.get("quantization", common)
    config["quantization"] = carried | {layer: of_target.get(layer, common) for layer in layers}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def _weights(folder: Path) -> dict[str, mx.array]:
    path = folder / "model.safetensors"
    try:
        loaded: Any = mx.load(str(path))
    except (RuntimeError, OSError) as error:
        raise ModelError(f"cannot read the weights {str(path)!r}: {error}") from error
    weights: dict[str, mx.array] = loaded
    return weights


def main() -> int:
    """Run the command line of this module; report errors like a child of the supervisor."""
    parser = argparse.ArgumentParser()
    for name in ("carried", "target", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--lifeline", type=int)
    arguments = parser.parse_args()
    try:
        with produce_folder(arguments.folder, arguments.lifeline) as folder:
            assemble(arguments.carried, arguments.target, folder)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return ModelError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
