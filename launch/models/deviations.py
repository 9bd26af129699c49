"""Deviations of converted models from their GGUF files, as the conversion reported them."""

import json
from pathlib import Path

import msgspec

from protocol.errors import ModelError


class InexactWeights(msgspec.Struct, frozen=True):
    """Weights of one GGUF type that MLX's formats cannot hold exactly."""

    type: str
    layers: list[str]
    relative: float
    """Root mean square of the deviations over that of the weights, in the worst layer."""
    largest: float
    """The largest deviation of a weight."""


def read_deviations(folder: Path) -> list[InexactWeights]:
    """Return how far a folder converted from GGUF is off its file; nothing for other folders.

    Raises:
        ModelError: the conversion's report is damaged.
    """
    try:
        report = json.loads((folder / "gguf.json").read_text(encoding="utf-8"))
        layers_by_type = {kind: entry["layers"] for kind, entry in report["types"].items()}
        return [
            InexactWeights(
                kind,
                [layer["name"] for layer in layers],
                max(layer["relative"] for layer in layers),
                max(layer["largest"] for layer in layers),
            )
            for kind, layers in layers_by_type.items()
            if layers
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read gguf.json in {str(folder)!r}: {error!r}") from error


def describe_inexact(inexact: InexactWeights) -> str:
    """Describe which weights are off their GGUF file, and by how much, layer by layer."""
    numbers: dict[str, list[str]] = {}
    for name in inexact.layers:
        _, separator, rest = name.removesuffix(".weight").partition("model.layers.")
        number, _, weight = rest.partition(".")
        numbers.setdefault(weight if separator else name.removesuffix(".weight"), []).append(number)
    parts = [
        f"{weight} of layers {', '.join(sorted(which, key=int))}" if which != [""] else weight
        for weight, which in numbers.items()
    ]
    size = f"{inexact.relative:.2%} (root mean square), a weight by {inexact.largest:.2g} at most"
    return (
        f"{len(inexact.layers)} tensors of {inexact.type}, off by up to {size}: {'; '.join(parts)}"
    )
