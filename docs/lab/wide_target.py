"""The small target, widened to the cost of a large one without changing what it says.

`python docs/lab/wide_target.py FOLDER OUT --billions 7 --width 4096 --kv-heads 16`: a Llama
folder whose layers get more columns in their MLP and more heads, random ones whose outputs are
multiplied by zero, and whose residual stream is widened by zeros. It has as many layers as
before, so as many launches as a real model of that size has, products of such a model's shapes,
and real text, real drafts and real acceptance. 2, 3 and 4 ranks divide the MLP; the heads 2 and
4, or as `--kv-heads` says (three heads to each): with 6 of them 2, 3 and 6.
Weights are float16 and are made on the GPU where there is one. FOLDER must hold floats, as
`python -m services.gguf.convert FILE.gguf FOLDER --dense` writes them.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

_HEADS_A_KV_HEAD = 3
_LAYERS_A_FILE = 4


def pad(weight: mx.array, rows: int, columns: int, *, silent: bool) -> mx.array:
    """The weight in the corner of a larger one; the rest is zero if `silent`, else random."""
    kind = mx.zeros if silent else mx.random.normal
    noise: Any = kind((rows, columns)) * 0.02
    filler: mx.array = noise.astype(mx.float16)
    filler[: weight.shape[0], : weight.shape[1]] = weight.astype(mx.float16)
    return filler


def widen(name: str, weight: mx.array, config: dict[str, Any], wide: dict[str, Any]) -> mx.array:
    """One tensor of the wide target; `wide` is the configuration that it is to have."""
    stream, head, intermediate = wide["hidden_size"], config["head_dim"], wide["intermediate_size"]
    part = name.split(".")[-2]
    if part.endswith("norm"):
        # The mean square of the wide stream is less by the share of its zeros.
        share: mx.array = weight.astype(mx.float32) * (config["hidden_size"] / stream) ** 0.5
        return mx.pad(share, [(0, stream - weight.size)]).astype(mx.float16)
    queries, kv = (wide[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    rows, columns, silent = {
        "embed_tokens": (weight.shape[0], stream, True),
        "gate_proj": (intermediate, stream, False),
        "up_proj": (intermediate, stream, False),
        "down_proj": (stream, intermediate, True),
        "q_proj": (queries, stream, False),
        "k_proj": (kv, stream, False),
        "v_proj": (kv, stream, False),
        "o_proj": (stream, queries, True),
    }[part]
    return pad(weight, rows, columns, silent=silent)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description="A wide target that says what a small one says.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--billions", type=float, default=8.0, help="of the MLPs")
    parser.add_argument("--width", type=int, help="of the residual stream; as it is unless given")
    parser.add_argument("--kv-heads", type=int, default=4)
    given = parser.parse_args()
    config = json.loads((given.folder / "config.json").read_text())
    if "quantization" in config:
        parser.error(f"{given.folder} is quantised: convert its file with --dense")
    layers = config["num_hidden_layers"]
    stream = given.width or config["hidden_size"]
    columns = given.billions * 1e9 / (3 * layers * stream)
    changed = {
        "hidden_size": stream,
        "rms_norm_eps": config["rms_norm_eps"] * config["hidden_size"] / stream,
        "intermediate_size": round(columns / 768) * 768,
        "num_attention_heads": _HEADS_A_KV_HEAD * given.kv_heads,
        "num_key_value_heads": given.kv_heads,
        "torch_dtype": "float16",
    }
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
        wide = {name: widen(name, weights[name], config, changed) for name in group}
        mx.save_safetensors(str(given.out / file), wide, {"format": "mlx"})
        index.update(dict.fromkeys(group, file))
    (given.out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (given.out / "config.json").write_text(json.dumps(config | changed, indent=1))


if __name__ == "__main__":
    main()
