"""Models in the caches of this machine, and the pairs they form."""

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from launch.models.gguf_models import (
    OLLAMA,
    convert_once,
    find_named,
    is_gguf,
    list_ggufs,
)
from launch.models.own_drafters import DEFAULT, default_target, require_default
from launch.models.weights import Weights, weights_of
from launch.settings.paths import cache_dir, conversions_dir
from launch.workers.worker import run_module
from protocol.decoding.vocabulary import Vocabulary, read_vocabulary
from protocol.errors import ModelError, UsageError
from protocol.jobs.gguf import GGUFDescription, ModelMetadata

Source = Literal["ssd", "hub", "folder", "lmstudio", "ollama"]
"""Origin of a model: our cache, the Hugging Face cache, a named folder, or another program's
files.
"""

_HEAD_FILE = "draft_head.json"
_NEEDED = ("config.json", "tokenizer.json")


class Model(ModelMetadata, frozen=True, kw_only=True):
    """A model folder, described from its files."""

    name: str
    """Name for --model and --draft-model."""
    folder: str
    """Its folder, or the GGUF file."""
    source: Source
    disk_bytes: int
    only_drafts: bool = False
    """True if its head contains only frequent tokens."""


class Fit(msgspec.Struct, frozen=True):
    """Two models that share a tokenizer."""

    model: str
    draft_model: str
    ratio: float
    """Parameters of the drafter relative to the target: roughly the cost of a draft token."""


def list_models() -> list[Model]:
    """Return all models in the caches, ours first, and those of LM Studio and Ollama."""
    return [*_list_own(), *_list_hub(), *_list_ggufs()]


def find_model(reference: str) -> Model:
    """Read one model: a folder, `default`, a GGUF file, or a name in a cache.

    Nothing is downloaded; a GGUF file is converted if it has not been.

    Raises:
        UsageError: it is not on this machine.
        ModelError: its files are missing or invalid.
    """
    is_default = reference == DEFAULT
    folder = require_default(default_target()) if is_default else Path(reference).expanduser()
    described: Model | None
    file = folder if is_gguf(folder) else find_named(reference)
    if file is not None:
        folder = convert_once(file)
        described = _describe(reference, folder, "folder", _disk(folder))
    elif folder.is_dir():
        described = _describe(str(folder), folder.resolve(), "folder", _disk(folder))
    else:
        described = next((model for model in list_models() if model.name == reference), None)
    if described is None:
        raise UsageError(
            f"no model {reference!r} on this machine; `ssd models list` shows what is here, "
            "`ssd models pull OWNER/NAME` downloads from the hub"
        )
    if described.problem:
        raise ModelError(described.problem)
    return described


def add_folder(folder: Path, name: str) -> None:
    """Give a model folder a name for --model; the folder is not moved.

    Raises:
        UsageError: the name cannot be used, or is taken.
        ModelError: the folder does not contain a model.
    """
    if not re.fullmatch(r"\w[\w.-]*", name) or name == DEFAULT:
        raise UsageError(f"{name!r} cannot name a model; use letters, digits, . - and _")
    described = _describe(name, folder.resolve(), "folder", 0)
    if described.problem:
        raise ModelError(described.problem)
    link = cache_dir() / "models" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    try:
        link.symlink_to(folder.resolve(), target_is_directory=True)
    except FileExistsError as error:
        raise UsageError(
            f"there is a model {name!r} already; `ssd models rm {name}` removes it"
        ) from error


def own_model(name: str) -> Path:
    """Return the place of a model in our cache; raise UsageError if there is none."""
    place = cache_dir() / "models" / name
    if (
        Path(name).name != name
        or name in {"", ".", ".."}
        or not (place.is_symlink() or place.is_dir())
    ):
        raise UsageError(
            f"there is no model {name!r} in {str(place.parent)!r}; models of the hub are removed "
            "by `hf cache`"
        )
    return place


def remove(name: str) -> Path:
    """Remove a model from our cache, or only its name if its folder is elsewhere.

    A converted GGUF file is removed with its last name; the file itself is kept.

    Returns:
        The removed path.

    Raises:
        UsageError: there is no such model in our cache.
    """
    place = own_model(name)
    if place.is_symlink():
        folder = place.resolve()
        place.unlink()
        others = [link.resolve() for link in place.parent.iterdir() if link.is_symlink()]
        if folder.parent == conversions_dir().resolve() and folder not in others:
            shutil.rmtree(folder)
    else:
        shutil.rmtree(place)
    return place


def pairs(models: Iterable[Model]) -> list[Fit]:
    """Return pairs with the same vocabulary, and at most half the parameters in the drafter."""
    usable = [model for model in models if not model.problem]
    fits = [
        Fit(target.name, drafter.name, drafter.parameters / target.parameters)
        for target in usable
        for drafter in usable
        if not target.only_drafts
        and target.vocabulary == drafter.vocabulary
        and 0 < 2 * drafter.parameters <= target.parameters
    ]
    return sorted(fits, key=lambda fit: (fit.model, fit.ratio))


def _list_own() -> Iterator[Model]:
    base = cache_dir() / "models"
    for folder in sorted(base.iterdir()) if base.is_dir() else ():
        if folder.is_dir() and not folder.name.startswith("."):
            yield _describe(folder.name, folder, "ssd", _disk(folder))


def _list_hub() -> Iterator[Model]:
    # Heavy, and needed only here.
    from huggingface_hub import constants, scan_cache_dir  # noqa: PLC0415
    from huggingface_hub.errors import CacheNotFound  # noqa: PLC0415

    try:
        cached = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repository in sorted(cached.repos, key=lambda repo: repo.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        latest = max(repository.revisions, key=lambda revision: revision.last_modified)
        folder = Path(latest.snapshot_path)
        yield _describe(repository.repo_id, folder, "hub", repository.size_on_disk)


def _list_ggufs() -> Iterator[Model]:
    files = list_ggufs()
    if not files:
        return
    paths = [str(file.path) for file in files]
    lines = run_module("list of GGUF files", "services.gguf.describe", *paths).splitlines()
    for file, line in zip(files, lines, strict=True):
        description = msgspec.to_builtins(msgspec.json.decode(line, type=GGUFDescription))
        source: Source = "ollama" if file.name.startswith(OLLAMA) else "lmstudio"
        size = file.path.stat().st_size
        yield Model(
            name=file.name,
            folder=description.pop("path"),
            source=source,
            disk_bytes=size,
            **description,
        )


def _describe(name: str, folder: Path, source: Source, disk_bytes: int) -> Model:
    """Read the small files and the headers of the large ones; errors become `problem`."""
    bare = Model(name=name, folder=str(folder), source=source, disk_bytes=disk_bytes)
    if missing := [file for file in _NEEDED if not (folder / file).is_file()]:
        problem = f"the model folder {str(folder)!r} has no {missing[0]}"
        return msgspec.structs.replace(bare, problem=problem)
    try:
        weights, vocabulary = weights_of(folder), read_vocabulary(folder)
    except ModelError as error:
        return msgspec.structs.replace(bare, problem=str(error))
    return _complete(bare, weights, vocabulary)


def _complete(bare: Model, weights: Weights, vocabulary: Vocabulary) -> Model:
    folder = Path(bare.folder)
    return msgspec.structs.replace(
        bare,
        architecture=weights.architecture,
        parameters=weights.parameters,
        quantization=_quantization(folder),
        context_length=weights.context_length,
        weight_bytes=weights.bytes_as_stored,
        kv_bytes_per_token=weights.kv_bytes_on("gpu"),
        vocabulary=vocabulary.fingerprint,
        vocabulary_size=vocabulary.size,
        only_drafts=(folder / _HEAD_FILE).is_file(),
    )


def _quantization(folder: Path) -> str:
    config: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, dict) or "bits" not in quantization:
        return ""
    group = quantization.get("group_size")
    return f"{quantization['bits']} bits" + (f", groups of {group}" if group else "")


def _disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
