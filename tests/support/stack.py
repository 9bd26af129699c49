"""Helpers for tests with real processes: run directories, stacks, answers, children."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.settings.settings import StackSettings
from launch.stack.control import ask_supervisor
from launch.stack.session import private_stack
from launch.stack.supervisor import Supervisor
from protocol.client.client import Client
from protocol.messages import (
    ChatMessage,
    Done,
    Finished,
    Generate,
    Mode,
    ProcessStatus,
    Sampling,
    Statistics,
    Status,
    SwapDrafter,
    Text,
    Tokens,
)

DEADLINE_S = 120.0
"""Of every wait; only a test that fails waits as long, so it has room for the busiest machine."""


class PatientClient(Client):
    """A client that gives an orchestrator as long as any other wait has to come back."""

    def status(self, timeout_s: float = DEADLINE_S) -> Status:
        """As of any client."""
        return super().status(timeout_s)


class Answered:
    """One complete answer."""

    def __init__(self, tokens: Tokens, text: str, finished: Finished) -> None:
        self.tokens = tokens
        self.text = text
        self.reason = finished.reason
        self.cached_tokens = finished.cached_tokens
        self.statistics: Statistics = finished.statistics


Asking = Callable[[], Answered]


class RunningStack:
    """A stack, its client, and what its supervisor reported."""

    def __init__(self, supervisor: Supervisor, client: Client, lines: list[ProcessStatus]) -> None:
        self.supervisor = supervisor
        self.client = client
        self.lines = lines

    def pid(self, role: str) -> int:
        """The process that has this role, as soon as there is one that lives."""
        found: list[int] = []

        def here() -> bool:
            pids = [s.pid for s in self.client.status().services if s.role == role]
            found.extend(pid for pid in pids if not gone([pid]))
            return bool(found)

        eventually(here, f"a {role}")
        return found[0]

    def answer(
        self,
        prompt: str,
        *,
        mode: Mode = "ssd",
        sampling: Sampling | None = None,
        max_tokens: int = 32,
        stop: list[str] | None = None,
        tokens: Tokens | None = None,
        num_draft_tokens: int = 0,
        tree_nodes: int = 0,
        when: Callable[[int], None] | None = None,
    ) -> Answered:
        """Ask and wait; `when` is called with the number of tokens after each message."""
        request = Generate(
            request=self.client.number(),
            messages=[] if tokens else [ChatMessage("user", prompt)],
            tokens=tokens or [],
            sampling=sampling or Sampling(),
            max_tokens=max_tokens,
            stop=stop or [],
            mode=mode,
            num_draft_tokens=num_draft_tokens,
            tree_nodes=tree_nodes,
        )
        got: Tokens = []
        text = ""
        for message in self.client.generate(request):
            if isinstance(message, Text):
                got += message.tokens
                text += message.text
                if when is not None:
                    when(len(got))
            else:
                return Answered(got, text, message)
        raise AssertionError("an answer ends with Finished")

    def until(self, good: Callable[[Answered], bool], what: str, ask: Asking) -> Answered:
        """Ask again and again, until an answer is good.

        For what depends on which of two processes is faster: on a busy machine drafts may
        come too late for a while.
        """
        answers: list[Answered] = []

        def once() -> bool:
            answers.append(ask())
            return good(answers[-1])

        eventually(once, what)
        return answers[-1]

    def warm_up(self) -> None:
        """Ask until drafts come in time: the first ones of a process may be late."""
        self.until(
            lambda answer: answer.statistics.drafted > 0,
            "drafts come in time",
            lambda: self.answer("hello", mode="sd", max_tokens=8, num_draft_tokens=3),
        )


@contextlib.contextmanager
def running(settings: StackSettings) -> Iterator[RunningStack]:
    """A private stack with a client."""
    lines: list[ProcessStatus] = []
    with private_stack(settings, lines.append) as supervisor:
        client = PatientClient(supervisor.run_dir.clients_address)
        with contextlib.closing(client):
            yield RunningStack(supervisor, client, lines)


@contextlib.contextmanager
def unwatched_stops() -> Iterator[None]:
    """The supervisors of stacks that run inside leave stopped processes alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launch.stack.watchdog._STOPPED_S", 10 * DEADLINE_S)
        yield


@contextlib.contextmanager
def held(stack: RunningStack, role: str) -> Iterator[None]:
    """Inside, this process stands still, so that nothing goes on however long the test takes.

    For stacks with `unwatched_stops` and a `hang_timeout_s` of `DEADLINE_S`.
    """
    pid = stack.pid(role)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition with a deadline; fail with `what` if it does not come."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what}")
        time.sleep(0.02)


def gone(pids: list[int]) -> bool:
    """Whether none of these processes runs any more."""
    return not any(psutil.pid_exists(p) and _runs(p) for p in pids)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def leftovers(base: Path) -> list[str]:
    """What is left in the run folder of all stacks."""
    return sorted(str(p.relative_to(base)) for p in base.rglob("*")) if base.exists() else []


def answer_beside_death(stack: RunningStack, role: str, prompt: str, **request: Any) -> Answered:
    """The process of this role is killed once there are ten tokens."""
    alive = [stack.pid(role)]

    def kill(tokens: int) -> None:
        if tokens > 10 and alive:
            os.kill(alive.pop(), signal.SIGKILL)

    answer = stack.answer(prompt, when=kill, **request)
    assert not alive, "the answer was over before anything was killed"
    return answer


def restarted_verifier(stack: RunningStack, prompt: str, **request: Any) -> Answered:
    """The verifier is killed in an answer, again and again until one was not over before that."""

    def was_there(answer: Answered) -> bool:
        return answer.statistics.verifier_restarts > 0

    return stack.until(
        was_there,
        "an answer outlives its verifier",
        lambda: answer_beside_death(stack, "verifier", prompt, **request),
    )


def answer_beside_swap(
    stack: RunningStack, swap: SwapDrafter, prompt: str, **request: Any
) -> Answered:
    """The drafter is replaced once there are six tokens, and the answer is read on after that."""
    replies = []

    def once(tokens: int) -> None:
        if tokens > 6 and not replies:
            name = stack.supervisor.run_dir.path.name
            replies.append(ask_supervisor(name, swap, DEADLINE_S))

    answer = stack.answer(prompt, when=once, **request)
    assert replies == [Done()]
    return answer
