"""`python -m services.assemble CARRIED TARGET FOLDER`: a drafter with its target's embedding.

A distilled drafter is carried without its embedding table, which is the target's own and
would be most of its size. The assembled folder is an ordinary mlx-lm model folder with the
target's tokenizer.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from protocol.errors import ModelError

_EMBEDDING = "model.embed_tokens."
_HEAD = "lm_head."
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def assemble(carried: Path, target: Path, folder: Path) -> None:
    """Write the draft model `folder`; raises ModelError if a part is missing."""
    weights = _weights(carried)
    embedding = {k: v for k, v in _weights(target).items() if k.startswith((_EMBEDDING, _HEAD))}
    if not any(key.startswith(_EMBEDDING) for key in embedding):
        raise ModelError(f"the target {str(target)!r} has no tensor {_EMBEDDING}weight")
    folder.mkdir(parents=True, exist_ok=True)
    for file in carried.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    for name in _TOKENIZER_FILES:
        try:
            shutil.copyfile(target / name, folder / name)
        except FileNotFoundError as error:
            raise ModelError(f"the target {str(target)!r} has no {name}") from error
    mx.save_safetensors(
        str(folder / "model.safetensors"), {**weights, **embedding}, {"format": "mlx"}
    )


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
