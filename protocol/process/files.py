"""Atomic files: they appear whole or not at all, and no other user can redirect them.

Data is first written to a temporary file in the same folder: newly created (never an existing file,
never through a link), readable by its owner alone, with an unpredictable name. The name contains
the writer's process id, so that a killed writer's files can be found.
"""

import contextlib
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

_SUFFIX = ".tmp"
_LONGEST_NAME = 40
"""Characters of the destination's name in the temporary one: file systems allow 255 bytes."""

_ATTEMPTS = 10
"""Attempts; each takes longer than another thread needs to create one file."""

PRIVATE = 0o600
"""Mode of a file that only its owner may read."""
PUBLIC = 0o666
"""Mode of a file that others may read, as far as the umask allows."""


@contextlib.contextmanager
def atomic_writer(path: Path, *, mode: int = PRIVATE, sync: bool = False) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` at the end of the block, unless the block raises.

    Args:
        path: the destination. A link is replaced itself, not its target.
        mode: the new file's permissions, minus the umask.
        sync: flush the content to disk before it replaces the old file.

    Raises:
        OSError: it cannot be written; the destination is unchanged.
    """
    temporary = _temporary_path(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_atomically(
    path: Path, content: bytes | str, *, mode: int = PRIVATE, sync: bool = False
) -> None:
    """Replace `path` by a file with this content; arguments and errors as for `atomic_writer`."""
    with atomic_writer(path, mode=mode, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that replaces `path` at the end of the block, unless the block raises.

    Yields the path to create, in a folder that only its owner may enter.

    Raises:
        OSError: it cannot be created; `path` is unchanged.
    """
    with temporary_folder(path) as private:
        new, old = private / "new", private / "old"
        yield new
        if path.exists():
            path.rename(old)
        new.rename(path)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Create a temporary folder next to `path` that only its owner may enter; removed at the
    end.
    """
    private = _temporary_path(path)
    private.mkdir(mode=0o700)
    try:
        yield private
    finally:
        shutil.rmtree(private, ignore_errors=True)


def remove_temporaries(path: Path) -> None:
    """Remove the temporary files of this process next to `path`."""
    for temporary, writer in _temporaries(path.parent, path.name):
        if writer == os.getpid():
            _remove(temporary)


def remove_folder(folder: Path) -> None:
    """Delete a folder with all its content, including files added meanwhile."""
    for _ in range(_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Remove the temporary files of processes that have ended.

    Args:
        folder: their destination folder; it need not exist.
        name: name of the destination; empty: all destinations.
    """
    for temporary, writer in _temporaries(folder, name):
        if not psutil.pid_exists(writer):
            _remove(temporary)


def _temporary_path(path: Path) -> Path:
    unguessable = secrets.token_hex(8)
    return path.with_name(f"{_prefix(path.name)}{os.getpid()}.{unguessable}{_SUFFIX}")


def _prefix(name: str) -> str:
    return f".{name[:_LONGEST_NAME]}."


def _temporaries(folder: Path, name: str) -> Iterator[tuple[Path, int]]:
    """Yield temporary files and folders, each with its writer's process id."""
    pattern = f"{glob.escape(_prefix(name))}*{_SUFFIX}" if name else f".*{_SUFFIX}"
    for temporary in folder.glob(pattern):
        writer = temporary.name.removesuffix(_SUFFIX).rsplit(".", 2)[1:2]
        if writer and writer[0].isdecimal():
            yield temporary, int(writer[0])


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink()
