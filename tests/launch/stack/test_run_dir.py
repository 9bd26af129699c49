"""Run folders: private, described, and swept when their owner is dead."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from launch.stack.run_dir import Description, RunDir, claim, sweep
from protocol.errors import RuntimeFailure
from protocol.process.orphans import read_start_time, record_children, seconds_since

NOBODY = 2**22 + 1  # above the largest pid of Linux and macOS


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of run folders that does not exist yet, with a short path."""
    folder = tmp_path_factory.mktemp("r") / "b"
    monkeypatch.setenv("SSD_RUN_DIR", str(folder))
    return folder


def stack(name: str, owner: str) -> Path:
    """A run folder with this owner file."""
    run_dir = RunDir(name)
    run_dir.create()
    (run_dir.path / "owner").write_text(owner, encoding="utf-8")
    (run_dir.path / "verifier.log").write_text("words", encoding="utf-8")
    return run_dir.path


def test_folders_are_private(base: Path) -> None:
    """The base and each stack's folder are for this user alone."""
    run_dir = RunDir("x")
    run_dir.create()
    assert [path.stat().st_mode & 0o777 for path in (base, run_dir.path)] == [0o700, 0o700]
    assert run_dir.path == base / "x"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
def test_open_base_folders_are_refused(base: Path, mode: int) -> None:
    """A base that others may enter is refused, and the sentence says what to do."""
    base.mkdir()
    base.chmod(mode)
    with pytest.raises(RuntimeFailure, match=r"chmod 700 .*, or set SSD_RUN_DIR"):
        RunDir("x").create()
    assert not (base / "x").exists()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_bases_that_are_no_folder_are_refused(base: Path, kind: str) -> None:
    """A link, which may lead anywhere, and a file are refused as a base."""
    elsewhere = base.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if kind == "link":
        base.symlink_to(elsewhere)
    else:
        base.write_text("", encoding="utf-8")
    with pytest.raises(RuntimeFailure, match="must be your own"):
        RunDir("x").create()
    assert list(elsewhere.iterdir()) == []


def test_nothing_is_swept_in_a_base_that_is_refused(base: Path) -> None:
    """Folders behind a base that is not safely ours are not touched."""
    elsewhere = base.parent / "elsewhere"
    (elsewhere / "precious").mkdir(parents=True)
    (elsewhere / "precious" / "owner").write_text(f"{NOBODY} 0.0", encoding="utf-8")
    base.symlink_to(elsewhere)
    with pytest.raises(RuntimeFailure):
        RunDir("x").create()
    assert (elsewhere / "precious").exists()


def test_a_name_is_taken_once() -> None:
    """A second stack of a name is refused with a way out; after removal the name is free."""
    run_dir = RunDir("x")
    run_dir.create()
    claim(run_dir.path, os.getpid())
    with pytest.raises(RuntimeFailure, match="'x' is already running; stop it or use --name"):
        RunDir("x").create()
    run_dir.remove()
    run_dir.remove()
    RunDir("x").create()


def test_folders_of_the_dead_are_swept() -> None:
    """A folder whose owner is no process any more is removed with all that is in it."""
    folder = stack("dead", f"{NOBODY} 1.5")
    sweep()
    assert not folder.exists()


def test_a_pid_alone_does_not_save_a_folder() -> None:
    """A living process that was created at another time is somebody else."""
    started = read_start_time(psutil.Process())
    folder = stack("reused", f"{os.getpid()} {started - 100.0}")
    sweep()
    assert not folder.exists()


def test_folders_of_the_living_are_spared() -> None:
    """A folder that a living process has claimed stays."""
    folder = stack("alive", "")
    claim(folder, os.getpid())
    sweep()
    assert (folder / "verifier.log").exists()


@pytest.mark.skipif(not psutil.LINUX, reason="creation times are absolute elsewhere")
def test_a_clock_that_is_set_ends_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an hour: its folder stays, clients find it, and it has run for no longer."""
    folder = stack("alive", "")
    claim(folder, os.getpid())
    RunDir("alive").describe(os.getpid(), "target", "draft")
    booted, now = psutil.boot_time(), time.time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 3600.0)
    monkeypatch.setattr(time, "time", lambda: now + 3600.0)
    sweep()
    described = RunDir("alive").running()
    assert described is not None
    assert seconds_since(described.started) < now - psutil.Process().create_time() + 3605.0


@pytest.mark.parametrize("owner", ["", "7", "x y", "-1 0.0", "1 2 3", "7 yesterday"])
def test_folders_of_unknown_owners_are_spared(owner: str) -> None:
    """A folder whose owner file says nothing readable is left alone, and breaks nothing."""
    folder = stack("odd", owner)
    sweep()
    assert folder.exists()


def test_folders_without_owner_and_files_are_spared(base: Path) -> None:
    """What has no owner file is not ours to remove."""
    RunDir("young").create()
    (base / "note").write_text("x", encoding="utf-8")
    sweep()
    assert sorted(path.name for path in base.iterdir()) == ["note", "young"]


def test_creating_sweeps() -> None:
    """The next stack of the same name takes the place of one that died."""
    folder = stack("x", f"{NOBODY} 1.5")
    RunDir("x").create()
    assert folder.exists()
    assert list(folder.iterdir()) == []


def test_sweeping_before_anything_exists_is_safe(base: Path) -> None:
    """Without a base there is nothing to sweep."""
    sweep()
    assert not base.exists()


def test_a_described_stack_is_running() -> None:
    """A stack is known to clients from its description on, until its folder is removed."""
    run_dir = RunDir("x")
    assert run_dir.running() is None
    run_dir.create()
    assert run_dir.running() is None
    run_dir.describe(os.getpid(), "target", "draft")
    expected = Description(os.getpid(), read_start_time(psutil.Process()), "target", "draft")
    assert expected == RunDir("x").running()
    run_dir.remove()
    assert run_dir.running() is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"{}",
        msgspec.json.encode(Description(NOBODY, 1.5, "t", "d")),
        msgspec.json.encode(Description(os.getpid(), 1.5, "t", "d")),
    ],
    ids=["empty", "nonsense", "nothing", "nobody", "somebody else"],
)
def test_a_dead_or_unreadable_stack_is_not_running(content: bytes) -> None:
    """A description of a dead process, or of nothing, describes no running stack."""
    run_dir = RunDir("x")
    run_dir.create()
    (run_dir.path / "stack.json").write_bytes(content)
    assert run_dir.running() is None


def test_each_socket_and_log_has_its_own_path() -> None:
    """The three sockets and the logs are different files of the folder."""
    run_dir = RunDir("x")
    sockets = {run_dir.services_address, run_dir.clients_address, run_dir.control_address}
    assert len(sockets) == 3
    assert all(address.startswith(f"ipc://{run_dir.path}/") for address in sockets)
    assert run_dir.log("verifier") == run_dir.path / "verifier.log"


def test_a_long_name_is_refused() -> None:
    """A name that makes the sockets' paths too long is a RuntimeFailure."""
    run_dir = RunDir("x" * 100)
    with pytest.raises(RuntimeFailure, match="set SSD_RUN_DIR to a short one"):
        assert run_dir.services_address


def test_a_folder_that_others_can_exchange_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a folder in which everybody may rename, a private folder is not ours for long."""
    above = base.parent / "shared"
    above.mkdir()
    above.chmod(0o777)
    monkeypatch.setenv("SSD_RUN_DIR", str(above / "b"))
    with pytest.raises(RuntimeFailure, match="can replace the run folder"):
        RunDir("x").create()
    above.chmod(0o1777)
    RunDir("x").create()


def test_a_trap_is_not_attached_to(base: Path) -> None:
    """A client looks at the folder before it believes what is in it."""
    run_dir = RunDir("x")
    run_dir.create()
    run_dir.describe(os.getpid(), "model", "")
    assert run_dir.running() is not None
    base.chmod(0o755)
    with pytest.raises(RuntimeFailure, match="chmod 700"):
        run_dir.running()


def test_a_folder_of_a_dead_owner_takes_its_processes_along() -> None:
    """What a dead supervisor left behind is ended when its folder is swept."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    folder = stack("x", f"{NOBODY} 0.0")
    record_children(folder, [sleeper.pid])
    sweep()
    assert not folder.exists()
    assert sleeper.wait(60) == -signal.SIGKILL
