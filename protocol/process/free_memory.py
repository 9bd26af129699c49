"""Free memory of this process, and the limit that determines it.

The machine's free memory is not the only limit: a limit on the address space (`ulimit -v`) or of a
control group (containers, systemd) may be lower. An allocation beyond the former fails, which MLX's
CPU backend does not survive; beyond the latter, the kernel kills the process.
"""

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_NO_LIMIT = 1 << 60
"""Control groups of version 1 report a number above this if there is no limit."""
_PAGE = resource.getpagesize()


class FreeMemory(NamedTuple):
    """Free memory under one limit."""

    bytes: int
    limit: str
    """Its name for users."""


def free_memory(
    proc: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")
) -> FreeMemory:
    """Return the free memory under the lowest limit.

    Args:
        proc: folder of this process, where the system has one.
        groups: mount point of the control groups.
    """
    limits = [FreeMemory(psutil.virtual_memory().available, "the machine's memory")]
    if sys.platform == "linux":
        limits += [*_address_space(proc), *_control_groups(proc, groups)]
    return min(limits)


def _address_space(proc: Path) -> Iterator[FreeMemory]:
    """Yield RLIMIT_AS and RLIMIT_DATA."""
    for kind, field, name in (
        (resource.RLIMIT_AS, 0, "the limit on address space (ulimit -v)"),
        (resource.RLIMIT_DATA, 5, "the limit on data (ulimit -d)"),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            used = int((proc / "statm").read_text(encoding="ascii").split()[field])
            yield FreeMemory(max(0, limit - used * _PAGE), name)


def _control_groups(proc: Path, groups: Path) -> Iterator[FreeMemory]:
    """Yield the visible limits of this process's control groups and their ancestors."""
    with contextlib.suppress(OSError):
        for line in (proc / "cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                yield from _walk(groups, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in kinds.split(","):
                first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _walk(groups / "memory", path, *first)


def _walk(root: Path, path: str, limit: str, used: str, reclaimable: str) -> Iterator[FreeMemory]:
    leaf = root / path.lstrip("/")
    for folder in (leaf, *leaf.parents):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number, and not a limit
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
