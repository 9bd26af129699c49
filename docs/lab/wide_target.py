"""The small target, widened to the cost of a large one without changing what it says.

`python docs/lab/wide_target.py FOLDER OUT --billions 8`: a Llama folder whose layers get more
columns in their MLP and more heads, random ones whose outputs are multiplied by zero. It has as
many layers as before, so as many launches as a real model of that size has, and real text,
real drafts and real acceptance. The heads are padded to a number that 2 and 4 ranks divide.
Weights are float16 and are made on the GPU where there is one.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

_HEADS, _KV_HEADS = 12, 4
_LAYERS_A_FILE = 4


def pad(weight: mx.array, rows: int, columns: int, *, silent: bool) -> mx.array:
    """The weight in the corner of a larger one; the rest is zero if `silent`, else random."""
    kind = mx.zeros if silent else mx.random.normal
    noise: Any = kind((rows, columns)) * 0.02
    filler: mx.array = noise.astype(mx.float16)
    filler[: weight.shape[0], : weight.shape[1]] = weight.astype(mx.float16)
    return filler


def widen(name: str, weight: mx.array, config: dict[str, Any], intermediate: int) -> mx.array:
    """One tensor of the wide target."""
    hidden, head = config["hidden_size"], config["head_dim"]
    part = name.split(".")[-2]
    if part in ("gate_proj", "up_proj"):
        return pad(weight, intermediate, hidden, silent=False)
    if part == "down_proj":
        return pad(weight, hidden, intermediate, silent=True)
    if part == "q_proj":
        return pad(weight, _HEADS * head, hidden, silent=False)
    if part in ("k_proj", "v_proj"):
        return pad(weight, _KV_HEADS * head, hidden, silent=False)
    if part == "o_proj":
        return pad(weight, hidden, _HEADS * head, silent=True)
    return weight.astype(mx.float16)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description="A wide target that says what a small one says.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--billions", type=float, default=8.0)
    given = parser.parse_args()
    config = json.loads((given.folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    columns = given.billions * 1e9 / (3 * layers * config["hidden_size"])
    intermediate = round(columns / 256) * 256
    weights: Any = mx.load(str(given.folder / "model.safetensors"))
    given.out.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(given.folder / file, given.out)
    names: dict[int, list[str]] = {}
    for name in weights:
        parts = name.split(".")
        at = int(parts[2]) // _LAYERS_A_FILE if "layers" in parts else 0
        names.setdefault(at, []).append(name)
    index = {}
    for at, group in sorted(names.items()):
        file = f"model-{at:05d}.safetensors"
        wide = {name: widen(name, weights[name], config, intermediate) for name in group}
        mx.save_safetensors(str(given.out / file), wide, {"format": "mlx"})
        index.update(dict.fromkeys(group, file))
    (given.out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config |= {
        "intermediate_size": intermediate,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "torch_dtype": "float16",
    }
    (given.out / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
