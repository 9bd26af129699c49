"""How much memory this process may still take, and which limit says so.

The machine's free memory is not all that counts: a limit on the address space (`ulimit -v`) or
a control group's (containers, systemd) may be nearer. An allocation beyond the first fails,
which MLX's CPU backend does not survive; beyond the second, the kernel ends the process.
"""

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_NO_LIMIT = 1 << 60
"""What control groups of version 1 say where there is none is larger."""
_PAGE = resource.getpagesize()


class FreeMemory(NamedTuple):
    """Memory that is left under one limit."""

    bytes: int
    limit: str
    """Its name, for people."""


def free_memory(
    proc: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")
) -> FreeMemory:
    """Return the memory that is left under the nearest limit.

    Args:
        proc: of this process, where there is such a folder.
        groups: where the control groups are mounted.
    """
    found = [FreeMemory(psutil.virtual_memory().available, "the machine's memory")]
    if sys.platform == "linux":
        found += [*_address_space(proc), *_control_groups(proc, groups)]
    return min(found)


def _address_space(proc: Path) -> Iterator[FreeMemory]:
    """RLIMIT_AS and RLIMIT_DATA."""
    for kind, field, name in (
        (resource.RLIMIT_AS, 0, "the limit on address space (ulimit -v)"),
        (resource.RLIMIT_DATA, 5, "the limit on data (ulimit -d)"),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            used = int((proc / "statm").read_text(encoding="ascii").split()[field])
            yield FreeMemory(max(0, limit - used * _PAGE), name)


def _control_groups(proc: Path, groups: Path) -> Iterator[FreeMemory]:
    """Yield the limits of this process's groups and all above them, if they can be seen."""
    with contextlib.suppress(OSError):
        for line in (proc / "cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                yield from _walk(groups, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in kinds.split(","):
                first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _walk(groups / "memory", path, *first)


def _walk(root: Path, path: str, limit: str, used: str, reclaimable: str) -> Iterator[FreeMemory]:
    own = root / path.lstrip("/")
    for folder in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
            most = int((folder / limit).read_text(encoding="ascii"))
            if most < _NO_LIMIT:
                taken = int((folder / used).read_text(encoding="ascii"))
                taken -= _read_statistic(folder / "memory.stat", reclaimable)
                yield FreeMemory(max(0, most - taken), f"the control group's limit ({limit})")
        if folder == root:
            return


def _read_statistic(file: Path, name: str) -> int:
    for line in file.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
