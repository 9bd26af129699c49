"""Long prompts on real processes: they are tokenised beside the orchestrator, not in it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch.settings.settings import StackSettings
from orchestrator.text.prompt_encoder import INLINE_BYTES
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.errors import UsageError
from protocol.messages import Finished, Generate
from tests.support.stack import RunningStack, eventually, gone, running
from tests.support.tiny_models import write_endless_model

pytestmark = pytest.mark.processes

LONG = "the quick brown fox " * (INLINE_BYTES // 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_model(tmp_path_factory.mktemp("m") / "t", "sliding", seed=1)


@pytest.fixture(scope="module")
def stack(model: Path) -> Iterator[RunningStack]:
    with running(StackSettings(model=str(model), max_prompt_bytes=100_000)) as started:
        yield started


def count(stack: RunningStack, text: str) -> int:
    """How many tokens the orchestrator makes of a text."""
    request = Generate(request=stack.client.number(), text=text, count_only=True)
    [end] = list(stack.client.generate(request))
    assert isinstance(end, Finished)
    return end.prompt_tokens


def orchestrator(stack: RunningStack) -> psutil.Process:
    return psutil.Process(stack.client.status().pid)


def test_a_long_prompt_has_the_tokens_of_a_short_one(stack: RunningStack, model: Path) -> None:
    """And one that is too long is refused, with the limit."""
    tokenizer = TargetTokenizer(model)
    for text in ("the fox", LONG, LONG):
        assert count(stack, text) == len(tokenizer.encode_text(text))
    with pytest.raises(UsageError, match="max_prompt_bytes"):
        count(stack, "a" * 100_001)


def test_the_worker_ends_with_the_orchestrator(stack: RunningStack) -> None:
    """However that dies; its successor has a worker of its own, and answers."""
    before = count(stack, LONG)
    old = orchestrator(stack)
    workers = [child.pid for child in old.children()]
    assert workers
    os.kill(old.pid, signal.SIGKILL)
    eventually(lambda: gone(workers), "the worker ends")
    assert count(stack, LONG) == before
    assert orchestrator(stack).pid != old.pid
