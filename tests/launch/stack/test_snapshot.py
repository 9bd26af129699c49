"""`ssd top`: a running stack, looked at."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from launch.settings.settings import StackSettings
from launch.stack.snapshot import ProcessFigures, StackObserver, StackSnapshot
from launch.terminal.dashboard import draw, format_bytes, format_duration, format_plan, sparkline
from protocol.errors import RuntimeFailure, UsageError
from protocol.messages import (
    ChatMessage,
    Generate,
    PlannerState,
    SequenceStatus,
    Status,
    Text,
    WindowStats,
)
from tests.support.stack import (
    DEADLINE_S,
    RunningStack,
    eventually,
    held,
    running,
    unwatched_stops,
)
from tests.support.terminal import terminal
from tests.support.tiny_models import write_endless_model

processes = pytest.mark.processes

CHOICE = PlannerState(
    speculating=True, num_draft_tokens=6, branches=16, speculative_tok_s=52.04, plain_tok_s=40.31
)
SEQUENCE = SequenceStatus(
    sequence=7,
    state="verify",
    age_s=61.2,
    prompt_tokens=30,
    cached_tokens=12,
    tokens=99,
    tok_s=51.25,
    acceptance_rate=0.614,
    hit_rate=0.871,
    planner=CHOICE,
)
STATUS = Status(
    pid=10,
    model="/models/large",
    services=[],
    active=1,
    waiting=3,
    degraded=["there is no drafter at the moment: the target decodes plainly"],
    refused={"drafter": "its vocabulary is another"},
    window=WindowStats(
        seconds=10.0, busy_s=8.0, tokens=400, tok_s=50.0, rounds=160, plain_rounds=8,
        drafted=300, accepted=240, acceptance_rate=0.8, cache_hits=90, cache_misses=30,
        hit_rate=0.75,
    ),
    planner=CHOICE,
    sequences=[SEQUENCE],
)  # fmt: skip
VERIFIER = ProcessFigures(
    role="verifier", pid=4242, state="running", restarts=2, backend="mlx", model="/models/large",
    device="cuda:0", memory_bytes=1_234_000_000, cpu_percent=98.4, uptime_s=3725.0,
)  # fmt: skip
PICTURE = StackSnapshot(
    name="default", at=0.0, uptime_s=90.0, processes=[VERIFIER], free_memory_bytes=5_000_000_000,
    status=STATUS, problems=[],
)  # fmt: skip


def printed(picture: StackSnapshot, speeds: list[float] | None = None, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(draw(picture, speeds or [], "q ends"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(page: str, word: str) -> str:
    return next(row for row in page.splitlines() if word in row)


@pytest.mark.parametrize("width", [80, 120])
def test_everything_is_on_the_page(width: int) -> None:
    """Processes, requests, speed, rates, the planner's choice, and what is wrong."""
    page = printed(PICTURE, [10.0, 50.0], width)
    for words in (
        ["verifier", "4242", "running", "2", "1.2 GB", "98 %", "1 h 02 m", "mlx on cuda:0"],
        ["requests", "1 running, 3 waiting"],
        ["speed", "50.0 tok/s", "▂█"],
        ["acceptance ", "0.80 (240 of 300)"],
        ["cache hits", "0.75 (90 of 120)"],
        ["rounds", "160, 8 of them plain"],
        ["planner", "speculates, up to 6 draft tokens, 16 branches"],
        ["52.0 tok/s", "plain 40.3"],
        ["ssd 6 x 16", "verify", "1 m 01 s", "30", "12", "99", "51.2", "0.61", "0.87"],
    ):
        key, *rest = words
        for word in rest:
            assert word in line(page, key)
    assert "there is no drafter at the moment" in page
    assert "the last drafter was refused: its vocabulary is another" in page


def test_an_orchestrator_that_does_not_answer() -> None:
    """What is known is shown, and the reason why the rest is not."""
    silent = msgspec.structs.replace(PICTURE, status=None, problems=["no answer within 2 s"])
    page = printed(silent)
    assert "no answer within 2 s" in page
    assert "4242" in page
    assert "acceptance" not in page


def test_an_idle_stack() -> None:
    """Nothing to divide is no rate at all."""
    idle = msgspec.structs.replace(STATUS, window=WindowStats(seconds=3.0), active=0, sequences=[])
    page = printed(msgspec.structs.replace(PICTURE, status=idle))
    assert "idle" in line(page, "speed")
    assert line(page, "acceptance ").split()[-2:] == ["-", "│"]
    assert "none" in page


def test_words_and_units() -> None:
    """Sizes, times, bars and choices read as people say them."""
    assert [format_bytes(0), format_bytes(12_300_000), format_bytes(2_000_000_000)] == [
        "0 MB",
        "12 MB",
        "2.0 GB",
    ]
    assert [format_duration(5.4), format_duration(125.0), format_duration(7260.0)] == [
        "5 s",
        "2 m 05 s",
        "2 h 01 m",
    ]
    assert [sparkline([]), sparkline([0.0, 0.0]), sparkline([1.0, 8.0])] == ["", "", "▂█"]
    assert format_plan(PlannerState()) == "plain decoding"
    assert format_plan(PlannerState(mode="sd", speculating=True, num_draft_tokens=3)) == (
        "speculates, up to 3 draft tokens"
    )


# ---------------------------------------------------------------- a stack that runs


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A tiny pair."""
    base = tmp_path_factory.mktemp("pair")
    target = write_endless_model(base / "target", "llama", seed=1)
    draft = write_endless_model(base / "draft", "llama", seed=2)
    with (
        tempfile.TemporaryDirectory(prefix="ssd-t-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SSD_RUN_DIR", folder)
        patch.setattr("launch.stack.snapshot._ANSWER_S", DEADLINE_S)
        settings = StackSettings(
            model=str(target), draft_model=str(draft), hang_timeout_s=DEADLINE_S
        )
        with unwatched_stops(), running(settings) as made:
            yield made


def name_of(stack: RunningStack) -> str:
    return stack.supervisor.run_dir.path.name


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", "top", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


@processes
def test_one_look_as_json(stack: RunningStack) -> None:
    """Every process with its memory, the requests of late, and the plan: for scripts."""
    seen: dict[str, Any] = {}

    def looked() -> bool:
        stack.answer("hello", max_tokens=24)
        done = top("--once", "--json", "--name", name_of(stack))
        assert done.returncode == 0, done.stderr
        seen.update(json.loads(done.stdout))
        # On a busy machine an answer may take longer than `top` waits.
        return not seen["problems"] and bool(seen["status"]["window"]["requests"] > 0)

    eventually(looked, "it starts within the ten seconds that are of late")
    roles = {entry["role"]: entry for entry in seen["processes"]}
    assert set(roles) == {"supervisor", "orchestrator", "verifier", "drafter"}
    assert roles["verifier"]["pid"] == stack.pid("verifier")
    assert roles["supervisor"]["pid"] == os.getpid()
    assert all(entry["memory_bytes"] > 10**6 for entry in roles.values())
    assert {"running"} == {entry["state"] for entry in roles.values()}
    status = seen["status"]
    assert 0 < status["window"]["tokens"] <= 24
    assert status["window"]["requests"] == 1
    assert status["window"]["tok_s"] > 0
    assert status["window"]["rounds"] > 0
    assert status["planner"]["mode"] == "ssd"
    assert (status["active"], status["sequences"], seen["problems"]) == (0, [], [])


@processes
def test_a_request_is_seen_while_it_runs(stack: RunningStack) -> None:
    """A running sequence is told of, and is gone when it has ended."""
    request = Generate(
        request=stack.client.number(), messages=[ChatMessage("user", "hi")], max_tokens=20_000
    )
    with (
        contextlib.closing(stack.client.generate(request)) as events,
        contextlib.closing(StackObserver(name_of(stack))) as observer,
    ):
        assert isinstance(next(events), Text)
        with held(stack, "verifier"):
            status = observer.look().status
    assert status is not None
    (seen,) = status.sequences
    assert seen.tokens > 0
    assert seen.prompt_tokens > 0
    assert seen.state in {"verify", "draft"}
    eventually(lambda: not stack.client.status().sequences, "the cancelled request is gone")


@processes
def test_on_a_terminal(stack: RunningStack) -> None:
    """It draws and draws again, q ends it, and the terminal is as it was."""
    with terminal([sys.executable, "-m", "launch.cli", "top", "--name", name_of(stack)]) as screen:
        screen.wait_for("\x1b[?1049h", "verifier", str(stack.pid("verifier")), "planner")
        screen.wait_for("verifier", "drafter")
        screen.type("x")
        screen.wait_for("verifier")
        screen.type("q")
        assert screen.end() == 0
        assert "\x1b[?1049l" in screen.seen
        assert screen.before == screen.settings()


@processes
def test_ctrl_c_ends_it(stack: RunningStack) -> None:
    """The terminal is given back then too."""
    with terminal([sys.executable, "-m", "launch.cli", "top", "--name", name_of(stack)]) as screen:
        screen.wait_for("planner")
        screen.process.send_signal(signal.SIGINT)
        assert screen.end() == 130
        assert screen.before == screen.settings()


@processes
def test_a_pipe_gets_one_picture(stack: RunningStack) -> None:
    """Without a screen there is nothing to draw anew."""

    def looked() -> bool:
        done = top("--name", name_of(stack))
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        return "planner" in done.stdout

    eventually(looked, "the orchestrator answers in time")


@processes
def test_a_restart_is_counted(stack: RunningStack) -> None:
    """A process that died and was replaced says so."""
    old = stack.pid("drafter")
    os.kill(old, signal.SIGKILL)
    eventually(
        lambda: (
            old not in {s.pid for s in stack.client.status().services if s.role == "drafter"}
            and any(s.role == "drafter" for s in stack.client.status().services)
        ),
        "another drafter",
    )
    with contextlib.closing(StackObserver(name_of(stack))) as observer:
        (drafter,) = [p for p in observer.look().processes if p.role == "drafter"]
    assert drafter.restarts == 1
    assert drafter.pid == stack.pid("drafter")


def test_no_such_stack(run_dir: Path) -> None:
    """The name is named, and what to do."""
    with pytest.raises(UsageError, match="no stack named 'nobody' is running; start one"):
        StackObserver("nobody")


@processes
def test_a_stack_that_ends(stack: RunningStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who watches is told."""
    with contextlib.closing(StackObserver(name_of(stack))) as observer:
        monkeypatch.setattr("launch.stack.run_dir.RunDir.running", lambda self: None)
        with pytest.raises(RuntimeFailure, match="has ended"):
            observer.look()
