"""Processes by role, and nothing left of them, however the supervisor ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from launch.models.pair import Pair
from launch.settings.settings import StackSettings
from launch.stack import supervisor
from launch.stack.child import Lifeline
from launch.stack.run_dir import RunDir
from protocol.errors import RuntimeFailure
from protocol.messages import ServiceStatus
from tests.support.stack import DEADLINE_S, RunningStack, eventually, gone, leftovers, running
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

ROLES = {"ssd orchestrator", "ssd verifier", "ssd drafter"}


@pytest.fixture
def launched(tmp_path: Path, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`ssd launch` with a tiny pair, ready."""
    pair = [str(write_tiny_model(tmp_path / name, "llama", seed=n)) for n, name in enumerate("td")]
    command = [sys.executable, "-m", "launch.cli", "launch", "--name", "s"]
    process = subprocess.Popen(
        [*command, "--model", pair[0], "--draft-model", pair[1]],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    eventually((run_dir / "s" / "stack.json").exists, "the stack is ready")
    yield process
    process.kill()
    process.wait()


def children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip()


def test_each_role_is_a_named_process(launched: subprocess.Popen[bytes]) -> None:
    """`ps` shows one process per role, under the role's name, and helpers of theirs."""

    def roles() -> set[str]:
        titles = {title(child) for child in children(launched)}
        return {one for one in titles if one != "ssd text worker"}

    # A helper has its program's name until it has started.
    eventually(lambda: roles() == ROLES, "each role has its name")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left(
    launched: subprocess.Popen[bytes], run_dir: Path, number: signal.Signals
) -> None:
    """Ctrl-C, SIGTERM, SIGHUP or SIGKILL of the supervisor: no process, socket or file stays."""
    pids = [child.pid for child in children(launched)]
    os.kill(launched.pid, number)
    launched.wait(DEADLINE_S)
    eventually(lambda: gone(pids), "the children are gone")
    eventually(lambda: leftovers(run_dir) == [], "the run folder is empty")


def test_a_signal_is_heard_soon_whenever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes just before a wait is heard behind it: no wait is long."""
    watched = supervisor.Supervisor(StackSettings(), Pair("t", "d", "mlx"), RunDir("x"), print)
    waits: list[float] = []

    def wait(timeout_s: float) -> None:
        waits.append(timeout_s)
        watched.failure = RuntimeFailure("over")

    monkeypatch.setattr(watched, "_ended", SimpleNamespace(wait=wait))
    with pytest.raises(RuntimeFailure, match="over"):
        watched.wait()
    assert 0.0 < waits[0] <= 1.0


def test_a_second_interrupt_does_not_wait(launched: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Ctrl-C twice, in the launcher's own process group, while a child refuses to end: at once."""
    pids = [child.pid for child in children(launched)]
    stubborn = next(child for child in children(launched) if title(child) == "ssd verifier")
    stubborn.send_signal(signal.SIGSTOP)  # a stopped process does not hear SIGTERM
    os.killpg(launched.pid, signal.SIGINT)
    eventually(lambda: not psutil.pid_exists(pids[0]) or gone([pids[0]]), "the stack is stopping")
    os.killpg(launched.pid, signal.SIGINT)
    launched.wait(DEADLINE_S)
    eventually(lambda: gone(pids), "the children are gone")
    eventually(lambda: leftovers(run_dir) == [], "the run folder is empty")


def test_a_stopped_child_does_not_outlive_its_supervisor(
    launched: subprocess.Popen[bytes], run_dir: Path
) -> None:
    """SIGKILL of the supervisor while a child is stopped: the others end it and tidy up."""
    pids = [child.pid for child in children(launched)]
    stopped = next(child for child in children(launched) if title(child) == "ssd drafter")
    stopped.send_signal(signal.SIGSTOP)
    os.kill(launched.pid, signal.SIGKILL)
    launched.wait(DEADLINE_S)
    eventually(lambda: gone(pids), "the children are gone")
    eventually(lambda: leftovers(run_dir) == [], "the run folder is empty")


def test_another_user_cannot_reach_the_sockets(
    launched: subprocess.Popen[bytes], run_dir: Path
) -> None:
    """Whoever is not the owner can neither list the run folder nor connect to a socket in it."""
    if os.geteuid() != 0:
        pytest.skip("only root can try it as somebody else")
    code = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for name in ('services', 'clients', 'control'):\n"
        "    try:\n"
        "        socket.socket(socket.AF_UNIX).connect(f'{sys.argv[1]}/s/{name}.sock')\n"
        "    except PermissionError:\n"
        "        continue\n"
        "    sys.exit(1)\n"
    )
    command = [sys.executable, "-c", code, str(run_dir)]
    done = subprocess.run(command, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0
    assert launched.poll() is None


def test_a_start_that_fails_is_tried_again(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder may go in the very moment in which a process is replaced."""
    failures = [FileNotFoundError("no such folder"), BlockingIOError("no more processes")]
    start = supervisor.start_drafter

    def failing(*told: Any) -> Any:
        if failures:
            raise failures.pop()
        return start(*told)

    target = write_tiny_model(tmp_path / "t", "llama")
    with running(StackSettings(model=str(target), draft_model=str(target))) as stack:
        old = stack.pid("drafter")
        monkeypatch.setitem(supervisor._START, "drafter", failing)
        os.kill(old, signal.SIGKILL)
        eventually(
            lambda: any(s.role == "drafter" and s.pid != old for s in services(stack)),
            "another drafter",
        )
        assert not failures


def test_letting_go_twice_closes_nothing_else() -> None:
    """The numbers of closed files are soon those of others."""
    lifeline = Lifeline()
    lifeline.close()
    others = os.pipe()
    lifeline.close()
    for descriptor in others:
        os.close(descriptor)


def services(stack: RunningStack) -> list[ServiceStatus]:
    return stack.client.status().services
