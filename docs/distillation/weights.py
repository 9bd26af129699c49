"""The weights of a model folder in PyTorch; those in MLX's affine bits become floats."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_FAMILIES = ("llama", "qwen2")


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json`; refuse other families, whose layers differ."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in _FAMILIES:
        raise SystemExit(
            f"{folder} is of type {config['model_type']}; only {_FAMILIES} are written"
        )
    if config.get("rope_scaling"):
        raise SystemExit(f"{folder} scales its positions, which is not written")
    return config


def read_weights(
    folder: Path, config: dict[str, Any], device: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return all weights by name, on the device."""
    bits = config.get("quantization") or {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensors in _layers(folder, device):
        if "scales" not in tensors:
            weights |= {f"{name}.{part}": w.to(dtype) for part, w in tensors.items()}
            continue
        kind = bits.get(name, bits)
        weights[f"{name}.weight"] = _dequantise(tensors, kind["bits"]).to(dtype)
        if "bias" in tensors:
            weights[f"{name}.bias"] = tensors["bias"].to(dtype)
    return weights


def _layers(folder: Path, device: str) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield each layer's name and tensors; a layer's are in one file."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", device=device) as file:
            layers: dict[str, list[str]] = {}
            for key in file.keys():  # noqa: SIM118  # it is not iterable
                name, _, part = key.rpartition(".")
                layers.setdefault(name, []).append(part)
            for name, parts in layers.items():
                yield name, {part: file.get_tensor(f"{name}.{part}") for part in parts}


def _dequantise(tensors: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """[outputs, inputs] float32: `code * scale + bias`, one of each per group of inputs."""
    packed, scales = tensors["weight"].view(torch.uint8), tensors["scales"].float()
    if bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    elif bits != 8:
        raise SystemExit(f"weights of {bits} bits are not read; 4 and 8 are")
    codes = packed.view(*scales.shape, -1).float()
    return torch.addcmul(tensors["biases"].float()[..., None], codes, scales[..., None]).flatten(-2)
