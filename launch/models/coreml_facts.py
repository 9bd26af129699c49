"""Facts about a CoreML conversion, from its manifest."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from launch.models.coreml_models import MANIFEST
from protocol.errors import ModelError

_FACTS = (
    "architecture", "slots", "functions", "width", "state_write", "compression", "versions",
    "parity",
)  # fmt: skip
_HALF = 2
"""Bytes per number of the state."""


def source_of(folder: Path) -> Path | None:
    """Return the model that a conversion was made from; None if it is not a conversion.

    Raises:
        ModelError: its manifest cannot be read.
    """
    if not (folder / MANIFEST).is_file():
        return None
    try:
        return Path(str(json.loads((folder / MANIFEST).read_bytes())["source"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{str(folder / MANIFEST)!r} cannot be read ({error!r})") from error


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the parts of a conversion's manifest that are relevant to users.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return {name: manifest[name] for name in _FACTS}
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{str(folder / MANIFEST)!r} cannot be read ({error!r})") from error


class Conversion(NamedTuple):
    """A summary of a converted model."""

    text: str
    weight_bytes: int
    """Size of all its files."""
    state_bytes: int
    """Size of one sequence; does not grow."""


def conversion_in(folder: Path) -> Conversion:
    """Describe a converted folder.

    Raises:
        ModelError: its manifest cannot be read.
    """
    facts = read_facts(folder)
    try:
        shape, slots = facts["architecture"], int(facts["slots"])
        state = 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * slots * _HALF
        text = (
            f"{folder}: {shape['layers']} layers for CoreML, {slots} tokens, "
            f"compression {facts['compression']}"
        )
        agreed = facts["parity"].get("agreement")
        comparison = (
            f", best token equal on {agreed['greedy']:.3f} of those compared" if agreed else ""
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{str(folder / MANIFEST)!r} has unexpected content ({error!r})"
        ) from error
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Conversion(text + comparison, size, state)
