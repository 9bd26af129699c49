"""`python docs/distillation/pack.py CARRIED OUT --bits 6`: a carried drafter in few bits.

`services.tools.build_drafter` unpacks it. Matrices of groups of 64 are quantised, norms stay.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

_GROUP = 64


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description="A carried drafter in few bits.")
    parser.add_argument("carried", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=6)
    given = parser.parse_args()
    weights: Any = mx.load(str(given.carried / "model.safetensors"))
    packed: dict[str, mx.array] = {}
    for name, weight in weights.items():
        if weight.ndim != 2 or weight.shape[1] % _GROUP:
            packed[name] = weight
            continue
        layer = name.removesuffix(".weight")
        parts = mx.quantize(weight.astype(mx.float16), group_size=_GROUP, bits=given.bits)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[f"{layer}.{part}"] = array
    given.out.mkdir(parents=True)
    for file in given.carried.glob("*.json"):
        shutil.copyfile(file, given.out / file.name)
    config = json.loads((given.carried / "config.json").read_text())
    config["quantization"] = {"group_size": _GROUP, "bits": given.bits}
    (given.out / "config.json").write_text(json.dumps(config, indent=1))
    mx.save_safetensors(str(given.out / "model.safetensors"), packed, {"format": "mlx"})


if __name__ == "__main__":
    main()
