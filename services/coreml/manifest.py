"""Manifest of a converted package: everything a host needs to run it."""

from pathlib import Path

import msgspec

from protocol.errors import ModelError
from protocol.jobs.convert import Compression, StateWrite
from services.coreml.architecture import Architecture
from services.coreml.functions import PackageFunction, Part

FILE_NAME = "coreml.json"
"""Its presence marks a folder as a converted model (`launch/models/pair.py` looks for it)."""

EMBEDDING = "embedding.npy"
FORMAT = 1


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Versions that made the package."""

    coremltools: str
    numpy: str
    python: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A converted model."""

    format: int = FORMAT
    source: str
    """Folder that it was converted from."""
    source_fingerprint: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    """Vocabulary size of the tokenizer."""
    architecture: Architecture
    slots: int
    """Tokens that fit into the state, drafts included."""
    parts: list[Part]
    functions: list[PackageFunction]
    width: int
    """Number of best tokens that each product of the head returns."""
    head_size: int
    head_ids: list[int] = []
    """Token ids of a trimmed head's columns; empty if it is not trimmed."""
    state_write: StateWrite
    compression: Compression
    versions: Versions
    parity: dict[str, object] = {}
    """Figures of the comparison after the conversion."""

    def function(self, name: str) -> PackageFunction:
        """Return one function; raises ModelError if the package was made without it."""
        for function in self.functions:
            if function.name == name:
                return function
        raise ModelError(f"the package of {self.source!r} has no function {name!r}")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a converted model.

    Raises:
        ModelError: the folder holds none, or one of another format.
    """
    path = folder / FILE_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise ModelError(
            f"{str(folder)!r} is not a converted model; make one with `ssd convert`"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(
            f"{str(path)!r} cannot be read ({error}); convert the model again"
        ) from error
    if manifest.format != FORMAT:
        raise ModelError(f"{str(path)!r} has format {manifest.format}, not {FORMAT}; convert again")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into `folder`."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (folder / FILE_NAME).write_bytes(encoded)
