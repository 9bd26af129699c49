"""`python -m services.gguf.convert FILE.gguf FOLDER [--dense]`: a GGUF file as an mlx-lm folder.

On a CPU, where everything is computed in floats of 32 bits, scales are written so; elsewhere they
are of 16 bits, like the activations. On CUDA small models become dense, since MLX's products of
quantised weights are slower there than those of floats.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from protocol.errors import ModelError, SsdError
from protocol.process.child import produce_folder
from services.gguf.architectures import Config, Family, config_of, family_of, heads_of, name_of
from services.gguf.blocks import GROUP_SIZE, Deviation
from services.gguf.file import GGUFFile
from services.gguf.tokenizer import write_tokenizer
from services.gguf.weights import Plan, plan_tensor, write_weights
from services.mlx.lean_imports import leave_out_unused_libraries

_DENSE_ON_CUDA = 4_000_000_000
"""Parameters up to which a model becomes dense there."""
REPORT = "gguf.json"
"""What the conversion did, in the model's folder."""


def convert(source: Path, folder: Path, *, unit: str = "cpu", dense: bool = False) -> None:
    """Write the mlx-lm model `folder` from the GGUF file `source`.

    Args:
        source: the GGUF file.
        folder: is created.
        unit: where the model will be computed: "cpu", "metal" or "cuda".
        dense: whether quantised weights become floats.

    Raises:
        ModelError: the file is missing, damaged, or of a kind that cannot be converted.
        OSError: the folder cannot be written.
    """
    file = GGUFFile(source)
    family = family_of(file)
    config = config_of(file, family)
    dense = dense or (unit == "cuda" and file.parameters <= _DENSE_ON_CUDA)
    plans = _plans(file, family, config, unit, dense=dense)
    _check_layers(file, plans, config)
    folder.mkdir(parents=True, exist_ok=True)
    config["eos_token_id"] = write_tokenizer(file, folder)
    if (bos := file.value("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    if bits := {plan.name.removesuffix(".weight"): plan.bits for plan in plans if plan.packed}:
        config["quantization"] = _quantization(bits)
    deviations = write_weights(plans, source, folder / "model.safetensors")
    _write_json(folder / "config.json", config)
    ends: Config = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _write_json(folder / "generation_config.json", ends)
    _write_json(folder / REPORT, _report(file, plans, deviations))


def _plans(file: GGUFFile, family: Family, config: Config, unit: str, *, dense: bool) -> list[Plan]:
    plans = []
    for tensor in file.tensors:
        if name := name_of(tensor, family):
            shifted = family.shifted_norms and name.endswith("norm.weight")
            plan = plan_tensor(
                tensor,
                name,
                heads=heads_of(tensor, family, config),
                shift=1.0 if shifted else 0.0,
                unit=unit,
                dense=dense,
            )
            plans.append(plan)
    return plans


def _check_layers(file: GGUFFile, plans: Iterable[Plan], config: Config) -> None:
    """Refuse a file that lacks layers, or has the same weight twice."""
    names = [plan.name for plan in plans]
    if len(set(names)) != len(names):
        raise ModelError(f"{str(file.path)!r} has two tensors for one weight")
    layers = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    if layers != set(range(config["num_hidden_layers"])):
        raise ModelError(
            f"{str(file.path)!r} says that it has {config['num_hidden_layers']} layers, and has "
            f"tensors of {len(layers)}"
        )


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """Write the commonest width for all layers, and each layer that has another."""
    common = Counter(bits.values()).most_common(1)[0][0]
    others = {
        layer: {"group_size": GROUP_SIZE, "bits": width}
        for layer, width in bits.items()
        if width != common
    }
    return {"group_size": GROUP_SIZE, "bits": common, **others}


def _report(file: GGUFFile, plans: list[Plan], deviations: dict[str, Deviation]) -> dict[str, Any]:
    """Per type of the file: how its tensors are kept, and how far off they are."""
    kinds: dict[str, dict[str, Any]] = {}
    for plan in plans:
        kind = plan.tensor.tensor_type
        entry = kinds.setdefault(kind.name, {"tensors": 0, "parameters": 0, "layers": []})
        entry["tensors"] += 1
        entry["parameters"] += int(plan.tensor.n_elements)
        if not plan.packed:
            entry["kept"] = {o.dtype for o in plan.outputs}.pop()
            continue
        entry["kept"] = f"{plan.bits} bits, groups of {GROUP_SIZE}, scales {plan.outputs[1].dtype}"
        off = deviations[plan.tensor.name]
        if off.squares:
            entry["layers"].append(
                {
                    "name": plan.name,
                    "largest": off.largest,
                    "relative": (off.squares / off.power) ** 0.5,
                }
            )
    return {
        "source": str(file.path.resolve()),
        "name": str(file.value("general.name", "")),
        "architecture": file.architecture,
        "types": kinds,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def main() -> int:
    """The command line of this module; reports like a child of the supervisor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--lifeline", type=int)
    arguments = parser.parse_args()
    leave_out_unused_libraries()
    # It takes in mlx-lm, so this comes after the libraries that it does without.
    from services.mlx.loader import compute_unit  # noqa: PLC0415

    try:
        with produce_folder(arguments.folder, arguments.lifeline) as folder:
            convert(arguments.source, folder, unit=compute_unit(), dense=arguments.dense)
    except SsdError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error: cannot write {str(arguments.folder)!r}: {error.strerror}\n")
        return ModelError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
