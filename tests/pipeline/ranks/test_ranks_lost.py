"""Ranks that are killed or stopped: the same tokens, and nothing left behind."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from launch.settings.settings import StackSettings
from tests.pipeline.ranks.test_ranks import PROMPT, TOKENS, ask, pids_of
from tests.support.stack import (
    Answered,
    PatientClient,
    RunningStack,
    eventually,
    gone,
    leftovers,
    running,
)
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

FIRST_TOKENS = itertools.count(3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> StackSettings:
    base = tmp_path_factory.mktemp("pair")
    target = write_tiny_model(base / "target", "llama", seed=1)
    draft = write_tiny_model(base / "draft", "llama", seed=1, noise=0.1)
    return StackSettings(model=str(target), draft_model=str(draft))


@pytest.fixture(scope="module")
def stack(pair: StackSettings) -> Iterator[RunningStack]:
    settings = msgspec.structs.replace(pair, target_ranks=2, restarts=50, prefill_step_size=16)
    with running(settings) as started:
        yield started


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_while_verifying(
    stack: RunningStack, rank: int, number: signal.Signals
) -> None:
    """The group ends and starts again, the answer goes on with the same tokens, none is left."""
    plain = ask(stack, "T0", "ar").tokens
    old = pids_of(stack)
    todo = [old[rank]]

    def strike(count: int) -> None:
        if count >= 5 and todo:
            os.kill(todo.pop(), number)

    answer = stack.answer(PROMPT, max_tokens=TOKENS, num_draft_tokens=3, when=strike)
    assert answer.tokens == plain
    eventually(lambda: gone(old), "the old ranks are gone")
    assert pids_of(stack, but=old)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_while_a_prompt_is_computed(
    stack: RunningStack, rank: int, number: signal.Signals
) -> None:
    """A prompt that waits for a stopped rank is computed by the next group."""
    old = pids_of(stack)
    os.kill(old[1], signal.SIGSTOP)  # so that the prompt is not through before we strike
    tokens = [next(FIRST_TOKENS), *range(2, 200)]  # nothing of it is cached
    answers: list[Answered] = []

    def answer() -> None:
        with closing(PatientClient(stack.supervisor.run_dir.clients_address)) as client:
            own = RunningStack(stack.supervisor, client, stack.lines)
            answers.append(own.answer("", tokens=tokens, max_tokens=8))

    asking = threading.Thread(target=answer)
    asking.start()
    eventually(lambda: stack.client.status().active == 1, "the prompt is in work")
    with suppress(ProcessLookupError):  # the group may have been given up meanwhile
        os.kill(old[rank], number)
    asking.join()
    [answered] = answers
    assert answered.tokens == stack.answer("", tokens=tokens, mode="ar", max_tokens=8).tokens
    assert answered.tokens
    eventually(lambda: gone(old), "the old ranks are gone")


def test_the_reason_names_the_rank(stack: RunningStack) -> None:
    """Whoever looks at the log or the status reads which rank was lost, and how."""
    old = pids_of(stack)
    os.kill(old[1], signal.SIGKILL)
    pids_of(stack, but=old)
    notes = [line.note for line in stack.lines if line.role == "verifier"]
    assert any("rank 1 on 127.0.0.1 was killed by signal 9" in note for note in notes)


def test_nothing_is_left_at_the_end(pair: StackSettings, run_dir: Path) -> None:
    """A stack that stops takes its ranks with it, also one that is stopped by a signal."""
    with running(msgspec.structs.replace(pair, target_ranks=2)) as stack:
        pids = pids_of(stack)
        os.kill(pids[1], signal.SIGSTOP)
    eventually(lambda: gone(pids), "all ranks are gone")
    assert leftovers(run_dir) == []


@pytest.mark.usefixtures("run_dir")
def test_each_rank_of_a_pipeline_may_die(tmp_path: Path) -> None:
    """One after the other, each in the middle of an answer."""
    target = write_tiny_model(tmp_path / "target", "qwen2", seed=1)
    settings = StackSettings(
        model=str(target), draft_backend="ngram", target_ranks=2, split="1,2", restarts=50
    )
    with running(settings) as stack:
        plain = ask(stack, "T0", "ar").tokens
        for rank in range(2):
            old = pids_of(stack)
            todo = [old[rank]]

            def strike(count: int, todo: list[int] = todo) -> None:
                if count >= 5 and todo:
                    os.kill(todo.pop(), signal.SIGKILL)

            assert stack.answer(PROMPT, max_tokens=TOKENS, when=strike).tokens == plain
            eventually(lambda old=old: gone(old), "the old ranks are gone")  # type: ignore[misc]  # bound at once
            pids_of(stack, but=old)
