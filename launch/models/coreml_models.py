"""CoreML conversions of models: in the named folder, or in one next to it."""

from pathlib import Path

from protocol.errors import ModelError

MANIFEST = "coreml.json"
"""Written by `services/coreml/manifest.py`."""


def default_conversion_dir(folder: Path) -> Path:
    """Return the default folder for the converted form of a model."""
    return folder.with_name(f"{folder.name}-coreml")


def find_converted(folder: Path) -> Path | None:
    """Return the converted form of a model, if there is one: itself, or the folder next to it."""
    return next(
        (
            place
            for place in (folder, default_conversion_dir(folder))
            if (place / MANIFEST).is_file()
        ),
        None,
    )


def is_converted(folder: Path) -> bool:
    """Return True if this folder itself is a converted model."""
    return find_converted(folder) == folder


def require_converted(folder: Path) -> Path:
    """Return the converted form of a model; raise ModelError if there is none."""
    converted = find_converted(folder)
    if converted is None:
        raise ModelError(
            f"{str(folder)!r} is not converted to CoreML, and there is no "
            f"{str(default_conversion_dir(folder))!r}; "
            f"run `ssd convert --model {folder}` once"
        )
    return converted
