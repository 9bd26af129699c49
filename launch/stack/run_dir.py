"""Run directories: the private folder of a stack's sockets, logs and description.

`BASE/NAME/` is 0700 and owned by the user. `stack.json` in it says whose it is; a folder
whose owner is dead is swept when another stack starts.
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
from protocol.process.orphans import kill_children, record_children
from protocol.transport.address import ipc_address

DEFAULT_NAME = "default"
_DESCRIPTION = "stack.json"
_CLOCK_SLACK_S = 2.0  # a correction of the system clock moves creation times a little


class Description(msgspec.Struct, frozen=True):
    """Contents of `stack.json` of a running stack."""

    pid: int
    """Of the supervisor."""
    started: float
    """Creation time of that process: a pid alone may be somebody else's by now."""
    model: str
    """Empty for a server of several models, which have stacks of their own."""
    draft_model: str
    adapter: str = ""
    """Folder of the target's adapter."""
    settings: dict[str, Any] = {}
    """Those that are not as by default, by name."""


class RunDir:
    """One stack's folder."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise UsageError(f"--name {name!r}: use letters, digits, - and _")
        self.path = run_base() / name

    @property
    def services_address(self) -> str:
        """Where services connect."""
        return ipc_address(str(self.path / "services.sock"))

    @property
    def clients_address(self) -> str:
        """Where clients connect."""
        return ipc_address(str(self.path / "clients.sock"))

    @property
    def control_address(self) -> str:
        """Where the supervisor takes commands."""
        return ipc_address(str(self.path / "control.sock"))

    def idle_flag(self, role: str) -> Path:
        """Where a service says that it has nothing to do."""
        return self.path / f"{role}-idle"

    def log(self, role: str) -> Path:
        """The log of a process."""
        return self.path / f"{role}.log"

    def create(self) -> None:
        """Make the folder, private to this user.

        Raises:
            RuntimeFailure: a living stack of this name has it, or it is not safely ours.
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
        """Make the stack known to clients; call when it is ready."""
        started = psutil.Process(pid).create_time()
        description = Description(pid, started, model, draft_model, adapter, settings or {})
        write_atomically(self.path / _DESCRIPTION, msgspec.json.encode(description))

    def note(self, pids: list[int]) -> None:
        """Write down the stack's processes, for whoever finds the folder without its owner."""
        record_children(self.path, pids)

    def restore(self, pid: int) -> None:
        """Make the folder anew after somebody else deleted it; it is to be described again."""
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(parents=True, mode=0o700)
        claim(self.path, pid)

    def running(self) -> Description | None:
        """The stack that lives here, if it does.

        Raises:
            RuntimeFailure: others can get at the folder, so it may be a trap.
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
        """Delete the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def claim(path: Path, pid: int) -> None:
    """Note who is starting a stack in `path`, so that a sweep spares it."""
    (path / "owner").write_text(f"{pid} {psutil.Process(pid).create_time()}", encoding="utf-8")


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
        same = abs(process.create_time() - started) < _CLOCK_SLACK_S
        return same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def check_private(base: Path) -> None:
    """Refuse a run folder that others can read, enter or exchange for another.

    Raises:
        RuntimeFailure: it is a link, not ours, or open, or a folder above it lets others in.
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
