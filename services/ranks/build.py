"""Check that all ranks have the same build before they compute together; works without MLX."""

import hashlib
from importlib.metadata import version
from pathlib import Path

from protocol.errors import ModelError
from protocol.version import VERSION
from services.ranks.messages import Build

_SAMPLES, _SAMPLE_BYTES = 64, 65536
_SUFFIXES = (".safetensors", ".gguf")


def build_of(model: str) -> Build:
    """Return this process's versions and the digest of its copy of the model; "" means no model.

    Raises:
        ModelError: there is no such model folder.
    """
    return Build(
        ssd=VERSION,
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        weights=weights_digest(Path(model)) if model else "",
    )


def weights_digest(folder: Path) -> str:
    """Hash the configuration, and the size and 64 samples of 64 KiB of each weights file.

    Reading all of a large model would take minutes; files of up to 4 MiB are read completely.
    """
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for path in sorted(folder.iterdir()):
            if path.suffix in _SUFFIXES:
                size = path.stat().st_size
                digest.update(f"{path.name}\0{size}\n".encode())
                with path.open("rb") as file:
                    for sample in range(_SAMPLES):
                        file.seek(size * sample // _SAMPLES)
                        digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"there is no model folder at {str(folder)!r}: {error}") from error
    return digest.hexdigest()


def difference(own: Build, other: Build) -> str:
    """Return what differs, as a phrase that names both values; empty if nothing does."""
    for name, what in (
        ("ssd", "version of ssd"),
        ("mlx", "version of MLX"),
        ("mlx_lm", "version of mlx-lm"),
        ("weights", "model (digest of its files)"),
    ):
        here, there = getattr(own, name), getattr(other, name)
        if here != there:
            return f"another {what}: {there[:16]}, here {here[:16]}"
    return ""
