"""Scratch files and folders whose process was killed before it could remove them."""

import shutil
from pathlib import Path

import psutil


def remove_stale(place: Path, prefix: str) -> None:
    """Remove what is called `prefix`, a process id and perhaps more, if that process is gone."""
    for stale in place.glob(f"{prefix}*"):
        pid = stale.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            if stale.is_dir():
                shutil.rmtree(stale, ignore_errors=True)
            else:
                stale.unlink(missing_ok=True)
