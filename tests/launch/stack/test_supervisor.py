"""The supervisor when several things go wrong at once: it goes on watching, whatever it does."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from launch.settings.settings import StackSettings
from launch.stack import child
from launch.stack.control import ask_supervisor
from launch.stack.session import find_differences
from protocol.errors import RuntimeFailure, SsdError
from protocol.messages import Done, SwapDrafter
from tests.support.stack import DEADLINE_S, RunningStack, eventually, running
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

GOOD = [sys.executable, str(Path(__file__).parents[2] / "support" / "hostile_drafter.py"), "good"]
"""A program that drafts, by another name than ours."""


@pytest.fixture
def settings(tmp_path: Path, run_dir: Path) -> StackSettings:
    del run_dir
    target = write_tiny_model(tmp_path / "target", "llama", seed=1)
    return StackSettings(model=str(target), draft_backend="ngram", restarts=2)


@pytest.fixture
def stack(settings: StackSettings) -> Iterator[RunningStack]:
    with running(settings) as started:
        yield started


def test_a_swap_mends_what_it_waits_for(stack: RunningStack) -> None:
    """An orchestrator that is stopped as a swap begins is replaced, and the swap ends well."""
    old = stack.client.status().pid
    name = stack.supervisor.run_dir.path.name
    os.kill(old, signal.SIGSTOP)
    swap = SwapDrafter(backend="stdio", command=GOOD)
    assert ask_supervisor(name, swap, DEADLINE_S) == Done()
    assert stack.client.status().pid != old


def test_lookup_alone_has_no_drafter_process(stack: RunningStack) -> None:
    """Nothing is missing without one; a drafter comes by a swap, and goes by another."""
    name = stack.supervisor.run_dir.path.name

    def drafting() -> tuple[set[str], set[str], str | None, list[str]]:
        status = stack.client.status()
        processes = {process.role for process in stack.supervisor.processes}
        return processes, roles(stack), status.draft_backend, status.degraded

    alone = ({"orchestrator", "verifier"}, {"verifier"}, "ngram", [])
    assert drafting() == alone
    plain = stack.answer("the quick brown fox", mode="ar", max_tokens=24).tokens
    assert stack.answer("the quick brown fox", max_tokens=24, num_draft_tokens=3).tokens == plain
    swap = SwapDrafter(backend="stdio", command=GOOD)
    assert ask_supervisor(name, swap, DEADLINE_S) == Done()
    assert drafting() == (alone[0] | {"drafter"}, {"verifier", "drafter"}, "stdio", [])
    drafter = stack.pid("drafter")
    with pytest.raises(RuntimeFailure, match="takes no --draft-model"):
        ask_supervisor(name, SwapDrafter(backend="ngram", model="x"), DEADLINE_S)
    assert ask_supervisor(name, SwapDrafter(backend="ngram"), DEADLINE_S) == Done()
    eventually(lambda: drafting() == alone, "lookup alone again")
    assert not psutil.pid_exists(drafter)
    assert stack.answer("the quick brown fox", max_tokens=24).tokens == plain
    old = stack.client.status().pid
    os.kill(old, signal.SIGKILL)
    eventually(lambda: stack.client.status().pid != old, "another orchestrator")
    eventually(lambda: drafting() == alone, "it wants no drafter either")


def test_a_drafter_that_fails_to_come_leaves_lookup_alone(stack: RunningStack) -> None:
    """After a swap that fails there is no drafter, as before, and none is missed."""
    name = stack.supervisor.run_dir.path.name
    with pytest.raises(SsdError):
        ask_supervisor(name, SwapDrafter(backend="stdio", command=["false"]), DEADLINE_S)
    assert "drafter" not in {process.role for process in stack.supervisor.processes}
    assert stack.client.status().degraded == []


def test_a_stack_is_described_with_the_drafter_that_it_has(
    settings: StackSettings, tmp_path: Path
) -> None:
    """Not with the one that it was started with: who names that gets another stack."""
    draft = str(write_tiny_model(tmp_path / "draft", "llama", seed=2))
    named = msgspec.structs.replace(settings, draft_backend="mlx", draft_model=draft)
    with running(named) as stack:
        folder = stack.supervisor.run_dir
        before = folder.running()
        swap = SwapDrafter(backend="ngram")
        assert ask_supervisor(folder.path.name, swap, DEADLINE_S) == Done()
        after = folder.running()
    assert before is not None
    assert after is not None
    assert find_differences(before, named) == []
    assert find_differences(after, named) == ["draft_model", "draft_backend"]


def test_the_end_of_a_drafter_is_told_during_a_swap(
    settings: StackSettings, tmp_path: Path
) -> None:
    """Nobody waits for the drafts of a drafter that died while its successor was loading."""
    drafts = {"draft_backend": "stdio", "draft_command": shlex.join(GOOD)}
    with running(msgspec.structs.replace(settings, **drafts)) as stack:
        _see_the_end_of_a_drafter(stack, tmp_path)


def _see_the_end_of_a_drafter(stack: RunningStack, tmp_path: Path) -> None:
    old, go = stack.pid("drafter"), tmp_path / "go"
    words = f"until [ -e {shlex.quote(str(go))} ]; do sleep 0.05; done; exec {shlex.join(GOOD)}"
    swap = SwapDrafter(backend="stdio", command=["sh", "-c", words])
    name = stack.supervisor.run_dir.path.name
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(ask_supervisor, name, swap, DEADLINE_S)
        try:
            eventually(lambda: started_after(stack, old), "the new drafter is loading")
            os.kill(old, signal.SIGKILL)
            eventually(lambda: not roles(stack) & {"drafter"}, "the old one's death is known")
        finally:
            go.touch()
        assert done.result(DEADLINE_S) == Done()
    assert stack.pid("drafter") != old


def test_no_room_for_a_process_is_no_end(
    stack: RunningStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that cannot start a process now is asked again, at the cost of one restart."""
    start, refused = child.subprocess.Popen, threading.Event()
    left = [5]

    def short(command: list[str], **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        refused.set()
        return start(command, **options)

    monkeypatch.setattr(child.subprocess, "Popen", short)
    os.kill(stack.pid("verifier"), signal.SIGKILL)
    assert refused.wait(DEADLINE_S)
    assert len(stack.answer("the quick brown fox", max_tokens=4).tokens) == 4
    restarts = [line.restarts for line in stack.lines if line.role == "verifier"]
    assert max(restarts) == 1


def test_what_is_lost_stays_lost(settings: StackSettings) -> None:
    """An orchestrator that comes later hears that there will be no verifier any more."""
    slowly = msgspec.structs.replace(settings, restarts=1, restart_window_s=1000.0)
    with running(slowly) as stack:
        for _ in range(2):
            pid = stack.pid("verifier")
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: not has(stack, pid), "its death is known")  # type: ignore[misc]  # bound at once
            eventually(lambda: bool(here(stack)) or lost(stack), "another, or none any more")
        old = stack.client.status().pid
        os.kill(old, signal.SIGKILL)
        eventually(lambda: stack.client.status().pid != old, "another orchestrator")
        with pytest.raises(RuntimeFailure, match="it was restarted 1 times"):
            stack.answer("the quick brown fox", max_tokens=4)


def started_after(stack: RunningStack, old: int) -> bool:
    """Whether another drafter was started."""
    return any(line.role == "drafter" and line.pid != old for line in stack.lines)


def roles(stack: RunningStack) -> set[str]:
    """The services that the orchestrator knows."""
    return {service.role for service in stack.client.status().services}


def here(stack: RunningStack) -> list[int]:
    """The verifier that the orchestrator knows."""
    return [s.pid for s in stack.client.status().services if s.role == "verifier"]


def has(stack: RunningStack, pid: int) -> bool:
    return pid in here(stack)


def lost(stack: RunningStack) -> bool:
    return any(line.state == "lost" for line in stack.lines)
