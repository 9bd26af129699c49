"""Processes that outlive their supervisor, because the system holds them (SIGSTOP).

Every child ends itself when its supervisor dies (`child.watch_lifeline`), except one that
does not run. So the run folder names all of them, and whoever of them does run ends the
others before the folder goes.
"""

import contextlib
import os
import signal
from pathlib import Path

import psutil

from protocol.process.files import write_atomically

_CHILDREN = "children"
_TITLE = "ssd "


def record_children(folder: Path, pids: list[int]) -> None:
    """Write down the processes of the stack in `folder`, with their creation times."""
    lines: list[str] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(f"{pid} {psutil.Process(pid).create_time()}")
    with contextlib.suppress(OSError):  # a full disk costs a safety net, not the stack
        write_atomically(folder / _CHILDREN, "\n".join(lines))


def kill_children(folder: Path) -> None:
    """SIGKILL to those that are left, but not to us, nor to a stranger with an old pid."""
    try:
        lines = (folder / _CHILDREN).read_text(encoding="utf-8").splitlines()
        noted = [(int(pid), float(created)) for pid, created in map(str.split, lines)]
    except (OSError, ValueError):
        return
    for pid, created in noted:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if pid != os.getpid() and abs(psutil.Process(pid).create_time() - created) < 2.0:
                os.kill(pid, signal.SIGKILL)
