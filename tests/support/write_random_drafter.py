"""`python -m tests.support.write_random_drafter DRAFTER FOLDER`: a copy that knows nothing.

The matrices of its layers are random, of the same spread; embeddings, head and tokenizer are
the drafter's own. For measurements with a drafter of which next to nothing is accepted.
"""

import shutil
import sys
from pathlib import Path

import mlx.core as mx


def write(drafter: Path, folder: Path) -> None:
    """Copy a model folder; `folder` may exist."""
    shutil.copytree(drafter, folder, dirs_exist_ok=True)
    weights = mx.load(str(drafter / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.random.seed(0)
    spoilt = {key: _spoilt(key, weight) for key, weight in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), spoilt, {"format": "mlx"})


def _spoilt(key: str, weight: mx.array) -> mx.array:
    if ".layers." not in key or weight.ndim != 2:
        return weight
    spread = mx.std(weight.astype(mx.float32))
    return (mx.random.normal(weight.shape) * spread).astype(weight.dtype)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
