"""Where the CoreML form of a model is: the folder that was named, or one beside it."""

from pathlib import Path

from protocol.errors import ModelError

_MANIFEST = "coreml.json"
"""As `services/coreml/manifest.py` writes it."""


def beside(folder: Path) -> Path:
    """Where `ssd convert` puts the converted form of a model unless it is told otherwise."""
    return folder.with_name(f"{folder.name}-coreml")


def converted(folder: Path) -> Path | None:
    """The converted form of a model, if there is one: itself, or the folder beside it."""
    return next((one for one in (folder, beside(folder)) if (one / _MANIFEST).is_file()), None)


def require_converted(folder: Path) -> Path:
    """The converted form of a model; raises ModelError if there is none."""
    found = converted(folder)
    if found is None:
        raise ModelError(
            f"{str(folder)!r} is not converted to CoreML, and there is no {str(beside(folder))!r}; "
            f"run `ssd convert --model {folder}` once"
        )
    return found
