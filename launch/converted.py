"""Where the CoreML form of a model is: the folder that was named, or one beside it."""

import json
from pathlib import Path
from typing import Any

from protocol.errors import ModelError

_MANIFEST = "coreml.json"
"""As `services/coreml/manifest.py` writes it."""


_FACTS = ("slots", "functions", "width", "state_write", "compression", "versions", "parity")


def beside(folder: Path) -> Path:
    """Where `ssd convert` puts the converted form of a model unless it is told otherwise."""
    return folder.with_name(f"{folder.name}-coreml")


def converted(folder: Path) -> Path | None:
    """The converted form of a model, if there is one: itself, or the folder beside it."""
    return next((one for one in (folder, beside(folder)) if (one / _MANIFEST).is_file()), None)


def read_facts(folder: Path) -> dict[str, Any]:
    """What the manifest of a converted model says, as far as people compare models by it.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        return {name: manifest[name] for name in _FACTS}
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{str(folder / _MANIFEST)!r} cannot be read ({error!r})") from error


def require_converted(folder: Path) -> Path:
    """The converted form of a model; raises ModelError if there is none."""
    found = converted(folder)
    if found is None:
        raise ModelError(
            f"{str(folder)!r} is not converted to CoreML, and there is no {str(beside(folder))!r}; "
            f"run `ssd convert --model {folder}` once"
        )
    return found
