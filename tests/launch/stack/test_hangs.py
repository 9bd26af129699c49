"""Processes that neither work nor die: they are noticed, ended and replaced; no token is lost."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.settings.settings import StackSettings
from launch.stack import child
from protocol.errors import DeadlineExceeded
from protocol.messages import Tokens
from tests.support.stack import RunningStack, eventually, running
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

PROMPT = "the quick brown fox"
TOKENS = 48


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> StackSettings:
    base = tmp_path_factory.mktemp("pair")
    target = write_tiny_model(base / "target", "llama", seed=1)
    draft = write_tiny_model(base / "draft", "llama", seed=1, noise=0.1)
    return StackSettings(model=str(target), draft_model=str(draft))


@pytest.fixture(scope="module")
def stack(settings: StackSettings) -> Iterator[RunningStack]:
    with running(settings) as started:
        yield started


@pytest.fixture(scope="module")
def plain(stack: RunningStack) -> Tokens:
    """The answer of an undisturbed stack."""
    return stack.answer(PROMPT, mode="ar", max_tokens=TOKENS).tokens


def at(tokens: int, action: Callable[[], object]) -> Callable[[int], None]:
    """Does something once, when so many tokens have come."""
    todo = [action]

    def when(count: int) -> None:
        if count >= tokens and todo:
            todo.pop()()

    return when


@pytest.mark.parametrize("role", ["verifier", "drafter", "orchestrator"])
def test_a_stopped_process_is_replaced(stack: RunningStack, plain: Tokens, role: str) -> None:
    """SIGSTOP without an end, in the middle of an answer: same tokens, and a new child."""
    old = stack.client.status().pid if role == "orchestrator" else stack.pid(role)
    answer = stack.answer(
        PROMPT, max_tokens=TOKENS, when=at(8, lambda: os.kill(old, signal.SIGSTOP))
    )
    assert plain == answer.tokens
    eventually(lambda: process_of(stack, role) not in (0, old), f"another {role}")
    (line,) = [line for line in stack.lines if line.pid == old and line.state == "died"]
    assert f"the {role} was stopped for more than 1 s" in line.note


def process_of(stack: RunningStack, role: str) -> int:
    """The process with this role; 0 if there is none at the moment, or nobody knows."""
    try:
        status = stack.client.status(timeout_s=0.5)
    except DeadlineExceeded:
        return 0
    here = {str(service.role): service.pid for service in status.services}
    return {**here, "orchestrator": status.pid}.get(role, 0)


def test_a_verifier_that_hangs_in_a_call_is_replaced(
    settings: StackSettings, plain: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that never returns: the verifier is ended, and the answer goes on unchanged."""
    start = child.subprocess.Popen

    def sabotaged(command: list[str], **options: Any) -> Any:
        return start([part.replace("services.verifier.main", "tests.support.hanging_verifier")
                      for part in command], **options)  # fmt: skip

    monkeypatch.setattr(child.subprocess, "Popen", sabotaged)
    impatient = msgspec.structs.replace(settings, hang_timeout_s=8.0)
    with running(impatient) as stack:
        answer = stack.answer(PROMPT, max_tokens=TOKENS)
        notes = [line.note for line in stack.lines if line.role == "verifier"]
    assert (Path(settings.model) / "hung").exists()
    assert plain == answer.tokens
    assert answer.statistics.verifier_restarts >= 1  # a busy machine may look like a hang, too
    assert any("the verifier hangs: no sign of life" in note for note in notes)
