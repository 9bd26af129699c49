"""Cleanup of processes that outlive their supervisor because they are stopped (SIGSTOP).

Every child ends itself when its supervisor dies (`child.watch_lifeline`), unless it is stopped. So
the run folder lists all of them, and any child that does run kills the others before the folder is
removed.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from protocol.process.files import write_atomically

_CHILDREN = "children"
_TITLE = "ssd "


def read_start_time(process: psutil.Process) -> float:
    """Return when a process started, in seconds that no change of the system's clock shifts."""
    return process.create_time() - _clock_origin()


def seconds_since(started: float) -> float:
    """Return the time since a start (`read_start_time`)."""
    return max(0.0, time.time() - _clock_origin() - started)


def _clock_origin() -> float:
    """Return the boot's time on Linux, where creation times are counted from it."""
    return psutil.boot_time() if psutil.LINUX else 0.0


def record_children(folder: Path, pids: list[int]) -> None:
    """Record the processes of the stack in `folder`, with their creation times."""
    lines: list[str] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(f"{pid} {read_start_time(psutil.Process(pid))}")
    with contextlib.suppress(OSError):  # a full disk only disables the safety net
        write_atomically(folder / _CHILDREN, "\n".join(lines))


def kill_children(folder: Path) -> None:
    """Kill the remaining children, but neither this process nor a stranger with a reused pid."""
    try:
        lines = (folder / _CHILDREN).read_text(encoding="utf-8").splitlines()
        noted = [(int(pid), float(created)) for pid, created in map(str.split, lines)]
    except (OSError, ValueError):
        return
    for pid, created in noted:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if pid != os.getpid() and abs(read_start_time(psutil.Process(pid)) - created) < 2.0:
                os.kill(pid, signal.SIGKILL)
