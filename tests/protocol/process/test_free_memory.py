"""The nearest limit on memory is found, whoever has set it."""

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from protocol.process.free_memory import FreeMemory, free_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have none of it")

MB = 1 << 20
STATM = "100 10 5 1 0 50 0\n"


def test_the_machine_is_the_limit_where_nothing_else_is(tmp_path: Path) -> None:
    """Without control groups and limits, what the system says is left."""
    free = free_memory(folder_of(tmp_path, "0::/\n"), tmp_path / "groups")
    assert free.limit == "the machine's memory"
    assert 0 < free.bytes <= psutil.virtual_memory().total


@pytest.mark.parametrize("unlimited", ["max", str((1 << 63) - 4096)])
def test_a_group_without_a_limit_does_not_count(tmp_path: Path, unlimited: str) -> None:
    """`max` in version 2, and a number beyond all memory in version 1."""
    proc = folder_of(tmp_path, "4:memory:/a\n0::/a\n")
    for folder, names in ((tmp_path / "groups" / "a", V2), (tmp_path / "groups/memory/a", V1)):
        write_group(folder, names, unlimited, 1)
    assert free_memory(proc, tmp_path / "groups").limit == "the machine's memory"


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [("0::/own\n", "own", V2), ("9:cpu:/x\n4:memory:/own\n", "memory/own", V1)],
)
def test_a_control_group_is_a_limit(
    tmp_path: Path, line: str, folder: str, names: tuple[str, str, str]
) -> None:
    """Its limit less what it uses; files that the kernel may drop are not used."""
    write_group(tmp_path / "groups" / folder, names, str(50 * MB), 30 * MB, droppable=5 * MB)
    free = free_memory(folder_of(tmp_path, line), tmp_path / "groups")
    assert free == FreeMemory(25 * MB, f"the control group's limit ({names[0]})")


def test_the_nearest_group_counts(tmp_path: Path) -> None:
    """A group is inside its parents' limits, down to the one that is mounted."""
    groups = tmp_path / "groups"
    for path, limit in (("", 90), ("outer", 60), ("outer/inner", 80)):
        write_group(groups / path, V2, str(limit * MB), 10 * MB)
    proc = folder_of(tmp_path, "0::/outer/inner\n")
    assert free_memory(proc, groups).bytes == 50 * MB


@pytest.mark.parametrize(
    ("kind", "name"), [("RLIMIT_AS", "ulimit -v"), ("RLIMIT_DATA", "ulimit -d")]
)
def test_the_limits_of_a_process_count(kind: str, name: str) -> None:
    """In a process that lives under one."""
    code = (
        "import resource; from protocol.process.free_memory import free_memory; "
        f"resource.setrlimit(resource.{kind}, ({256 * MB},) * 2); print(*free_memory(), sep=';')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, timeout=60, text=True
    )
    left, _, limit = done.stdout.partition(";")
    assert name in limit
    assert 0 < int(left) < 256 * MB
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def folder_of(tmp_path: Path, groups: str) -> Path:
    """What stands for /proc/self, with these control groups."""
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "cgroup").write_text(groups, encoding="utf-8")
    (folder / "statm").write_text(STATM, encoding="ascii")
    return folder


def write_group(
    folder: Path, names: tuple[str, str, str], limit: str, used: int, *, droppable: int = 0
) -> None:
    """The files of one control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n", encoding="ascii")
    (folder / names[1]).write_text(f"{used}\n", encoding="ascii")
    text = f"anon 1\n{names[2]} {droppable}\nactive_file 7\n"
    (folder / "memory.stat").write_text(text, encoding="ascii")
