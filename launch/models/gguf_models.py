"""GGUF files on this machine: named ones, and those of LM Studio and Ollama."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launch.settings.paths import conversions_dir, ollama_dirs
from launch.stack.child import Lifeline
from launch.terminal import console
from launch.workers.worker import run_module
from protocol.errors import ModelError, SsdError, UsageError
from protocol.process.files import remove_leftovers

MAGIC = b"GGUF"
LM_STUDIO, OLLAMA = "lmstudio:", "ollama:"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DEFAULT_NAMESPACE, _DEFAULT_TAG = "library", "latest"

_FORMAT = 1
"""Version of converted folders; increase it when the conversion changes."""
_HEAD, _SAMPLE, _SAMPLES = 16 << 20, 64 << 10, 256
"""Bytes of a file that determine its name in the cache: its head, and samples of the rest."""
_CONVERTED_SIZE = 2.0
"""Largest size of a converted folder relative to its file: inexact types take eight bits."""


class Found(NamedTuple):
    """A GGUF file of another program."""

    name: str
    """Name for --model."""
    path: Path


def is_gguf(path: Path) -> bool:
    """Return True if a file is GGUF by its name or its first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC


def convert_once(source: Path) -> Path:
    """Return the mlx-lm folder of a GGUF file, which is converted on first use.

    Raises:
        ModelError: the file is damaged or of a kind that cannot be converted, or the disk is
            full.
    """
    folder = conversions_dir() / _fingerprint(source)
    if not (folder / "model.safetensors").is_file():
        check_space(folder.parent, round(_CONVERTED_SIZE * source.stat().st_size))
        with console.stderr().status(f"converting {source.name}"):
            convert(source, folder)
        console.note(f"converted {source.name}, once; it is kept in {folder.parent}")
    return folder


def convert(source: Path, folder: Path) -> None:
    """Convert a GGUF file into a folder, which appears when it is complete."""
    produce(folder, "services.gguf.convert", str(source))


def produce(folder: Path, module: str, *arguments: str) -> None:
    """Let a child process write `folder`, which appears only when it is complete.

    The child ends with this process, however that ends.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent)
    with contextlib.closing(Lifeline()) as lifeline:
        bound = f"--lifeline={lifeline.child_end}"
        try:
            run_module(
                *(module, module, bound, *arguments, str(folder)),
                descriptors=(lifeline.child_end,),
            )
        except ModelError:
            raise
        except SsdError as error:
            raise ModelError(f"{module} failed: {error}") from error
        finally:
            remove_leftovers(folder.parent)


def check_space(folder: Path, needed: int) -> None:
    """Raise ModelError if the disk of `folder` has less than `needed` bytes free."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ModelError(
            f"{needed / 1e9:.1f} GB are needed in {str(folder)!r}, and {free / 1e9:.1f} GB are "
            "free; SSD_CACHE_DIR names another place"
        )


def find_named(reference: str) -> Path | None:
    """Return the file for a name of `list_ggufs`; None if there is no such name.

    Raises:
        UsageError: that program has no such model.
    """
    if not reference.startswith((LM_STUDIO, OLLAMA)):
        return None
    names = {reference, f"{reference}:{_DEFAULT_TAG}"}
    for file in list_ggufs():
        if file.name in names:
            return file.path
    raise UsageError(f"there is no model {reference!r}; `ssd models list` shows what is here")


def list_ggufs() -> list[Found]:
    """Return the GGUF files of LM Studio and Ollama, in their place."""
    return [*_lm_studio(), *_ollama()]


def _lm_studio() -> Iterator[Found]:
    home = Path.home()
    for base in (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"):
        for path in sorted(base.glob("*/*/*.gguf")):
            # Image projectors are not models.
            if path.is_file() and not path.name.startswith("mmproj"):
                yield Found(f"{LM_STUDIO}{path.relative_to(base)}", path)


def _ollama() -> Iterator[Found]:
    for base in ollama_dirs():
        # Registry, namespace, model and tag.
        for manifest in sorted(base.glob("manifests/*/*/*/*")):
            blob = _blob_of(manifest, base)
            if blob is not None:
                namespace, model, tag = manifest.parts[-3:]
                owner = "" if namespace == _DEFAULT_NAMESPACE else f"{namespace}/"
                yield Found(f"{OLLAMA}{owner}{model}:{tag}", blob)


def _blob_of(manifest: Path, base: Path) -> Path | None:
    """Return the file of a manifest's model; None if it has none, or is not a manifest."""
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digest = next(layer["digest"] for layer in layers if layer["mediaType"] == _MODEL_LAYER)
        blob = base / "blobs" / Path(digest.replace(":", "-")).name
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None
    return blob if blob.is_file() else None


def _fingerprint(source: Path) -> str:
    """Return a hash of the file's size, its head and samples of the rest: it identifies the
    content.
    """
    size = source.stat().st_size
    digest = hashlib.sha256(f"{_FORMAT} {size} ".encode())
    with source.open("rb") as file:
        digest.update(file.read(_HEAD))
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE) * (number + 1) // _SAMPLES)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]
