"""Run directories: the private folder of a stack's sockets, logs and description.

`BASE/NAME/` is 0700 and owned by the user. `stack.json` in it names its owner; the folder of a dead
owner is removed when another stack starts.
"""

import contextlib
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec
import psutil

from launch.settings.paths import run_base
from protocol.errors import RuntimeFailure, UsageError
from protocol.process.files import write_atomically
from protocol.process.orphans import kill_children, read_start_time, record_children
from protocol.transport.address import ipc_address

DEFAULT_NAME = "default"
_DESCRIPTION = "stack.json"
_SLACK_S = 2.0  # the boot's time is read in whole seconds


class Description(msgspec.Struct, frozen=True):
    """Contents of `stack.json` of a running stack."""

    pid: int
    """Process id of the supervisor."""
    started: float
    """When that process started (`read_start_time`): the pid alone may have been reused."""
    model: str
    """Empty for a server of several models, which have separate stacks."""
    draft_model: str
    adapter: str = ""
    """Folder of the target's adapter."""
    settings: dict[str, Any] = {}
    """Settings that differ from their defaults, by name."""


class RunDir:
    """One stack's folder."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise UsageError(f"--name {name!r}: use letters, digits, - and _")
        self.path = run_base() / name

    @property
    def services_address(self) -> str:
        """Address for services."""
        return ipc_address(str(self.path / "services.sock"))

    @property
    def clients_address(self) -> str:
        """Address for clients."""
        return ipc_address(str(self.path / "clients.sock"))

    @property
    def control_address(self) -> str:
        """Address of the supervisor's command socket."""
        return ipc_address(str(self.path / "control.sock"))

    def idle_flag(self, role: str) -> Path:
        """Return the file in which a service reports that it is idle."""
        return self.path / f"{role}-idle"

    def log(self, role: str) -> Path:
        """Return the log of a process."""
        return self.path / f"{role}.log"

    def create(self) -> None:
        """Create the folder, private to this user.

        Raises:
            RuntimeFailure: a running stack of this name owns it, or it is not private.
        """
        base = run_base()
        with contextlib.suppress(FileExistsError):
            base.mkdir(parents=True, mode=0o700)
        check_private(base)
        sweep()
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError as error:
            raise RuntimeFailure(
                f"a stack named {self.path.name!r} is already running; stop it or use --name"
            ) from error

    def describe(
        self,
        pid: int,
        model: str,
        draft_model: str,
        adapter: str = "",
        *,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Publish the stack to clients; call when it is ready."""
        started = read_start_time(psutil.Process(pid))
        description = Description(pid, started, model, draft_model, adapter, settings or {})
        write_atomically(self.path / _DESCRIPTION, msgspec.json.encode(description))

    def note(self, pids: list[int]) -> None:
        """Record the stack's processes, for the removal of an abandoned folder."""
        record_children(self.path, pids)

    def restore(self, pid: int) -> None:
        """Recreate the folder after it was deleted; `describe` must be called again."""
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(parents=True, mode=0o700)
        claim(self.path, pid)

    def running(self) -> Description | None:
        """Return the stack that runs here, if any.

        Raises:
            RuntimeFailure: other users can access the folder, so it may be a trap.
        """
        if not run_base().exists():
            return None
        check_private(run_base())
        try:
            data = (self.path / _DESCRIPTION).read_bytes()
            description = msgspec.json.decode(data, type=Description)
        except (OSError, msgspec.DecodeError):
            return None
        return description if _alive(description.pid, description.started) else None

    def remove(self) -> None:
        """Delete the folder with all its content."""
        shutil.rmtree(self.path, ignore_errors=True)


def claim(path: Path, pid: int) -> None:
    """Record who is starting a stack in `path`, so that a sweep spares it."""
    (path / "owner").write_text(f"{pid} {read_start_time(psutil.Process(pid))}", encoding="utf-8")


def sweep() -> None:
    """Remove the folders of stacks whose supervisor is dead; spare those of unknown owners."""
    base = run_base()
    for folder in base.iterdir() if base.is_dir() else ():
        try:
            pid, started = (folder / "owner").read_text(encoding="utf-8").split()
            alive = _alive(int(pid), float(started))
        except (OSError, ValueError):
            continue
        if not alive:
            kill_children(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        same = abs(read_start_time(process) - started) < _SLACK_S
        return same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def check_private(base: Path) -> None:
    """Reject a run folder that other users can read, enter or replace.

    Raises:
        RuntimeFailure: it is a link, not ours, or open, or a parent folder is writable by
            others.
    """
    info = base.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != _own_uid() or info.st_mode & 0o077:
        raise RuntimeFailure(
            f"the run folder {str(base)!r} must be your own and private: "
            f"`chmod 700 {base}`, or set SSD_RUN_DIR"
        )
    for folder in base.resolve().parents:
        above = folder.stat()
        open_to_all = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
        if open_to_all or above.st_uid not in (0, _own_uid()):
            raise RuntimeFailure(
                f"other users can replace the run folder {str(base)!r}, because they own or can "
                f"write to {str(folder)!r}; set SSD_RUN_DIR to a folder in your home"
            )


def _own_uid() -> int:
    return psutil.Process().uids().real
