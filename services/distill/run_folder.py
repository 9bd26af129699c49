"""The folder of a run: check that it is ours, of the same run, and has enough space."""

import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import RuntimeFailure, UsageError
from protocol.jobs.distill import DistillSettings
from protocol.process.files import PUBLIC, write_atomically
from services.distill.data import Shards

_DESCRIPTION = "run.json"
_LOCK = "lock"

# May differ between two calls of one run: paths, speed and length. Some chat templates state the
# date, so the opening may differ too.
_FREE = frozenset(
    {
        "lifeline", "cores", "out", "threads", "evaluate_only", "prompts", "opening",
        "minutes", "steps", "session_minutes", "data_minutes", "data_tokens", "data_batch",
        "checkpoint_s", "bits",
    }
)  # fmt: skip


class RunFolder:
    """An open run folder, locked by this process."""

    def __init__(self, settings: DistillSettings) -> None:
        self.path = Path(settings.out)
        self.shards = Shards(self.path / "data")
        wanted = _description(settings)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_strangers()
            self._lock = _acquire_lock(self.path / _LOCK)
            known = read_description(self.path)
            if known is None:
                description = msgspec.json.encode(wanted)
                write_atomically(self.path / _DESCRIPTION, description, mode=PUBLIC)
            else:
                _refuse_other(self.path, known, wanted)
        except OSError as error:
            raise UsageError(f"cannot write to --out {settings.out!r}: {error}") from error

    def _refuse_strangers(self) -> None:
        names = {path.name for path in self.path.iterdir()}
        if names and _DESCRIPTION not in names and names - {_LOCK}:
            raise UsageError(
                f"--out {str(self.path)!r} holds other files; give a new or empty folder"
            )

    def check_space(self, needed: int) -> None:
        """Raise UsageError if the disk has fewer bytes left than this."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise UsageError(
                f"not enough disk space at {str(self.path)!r}: the run needs about "
                f"{needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
            )

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)


def read_description(folder: Path) -> dict[str, Any] | None:
    """Return the settings that the run in this folder was started with; None if there is none."""
    path = folder / _DESCRIPTION
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{str(path)!r} does not describe a run: {error}") from error


def _description(settings: DistillSettings) -> dict[str, Any]:
    values = {
        name: value
        for name, value in msgspec.json.decode(msgspec.json.encode(settings)).items()
        if name not in _FREE
    }
    values["prompts_sha256"] = _digest(settings.prompts)
    return values


def _digest(prompts: str) -> str:
    if not prompts:
        return ""
    try:
        return hashlib.sha256(Path(prompts).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"the prompts file {prompts!r} cannot be read: {error}") from error


def _refuse_other(path: Path, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = [key for key in sorted({*known, *wanted}) if known.get(key) != wanted.get(key)]
    if differing:
        key = differing[0]
        raise UsageError(
            f"--out {str(path)!r} holds a run with other settings "
            f"({key}: {known.get(key)!r}, now {wanted.get(key)!r}); give another --out"
        )


def _acquire_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RuntimeFailure(f"another `ssd distill` is running in {str(path.parent)!r}") from error
    return descriptor
