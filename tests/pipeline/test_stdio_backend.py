"""Programs of others as drafters, in running stacks: whatever they do, no token changes."""

import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from launch.settings.settings import StackSettings
from launch.stack.control import ask_supervisor
from protocol.errors import ModelError, RuntimeFailure, UsageError
from protocol.messages import Done, Mode, Sampling, SwapDrafter
from tests.support.stack import DEADLINE_S, RunningStack, eventually, gone, running
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

HOSTILE = Path(__file__).parents[1] / "support" / "hostile_drafter.py"
PROMPT = "the quick brown fox"
SAMPLING = Sampling(temperature=0.7, seed=5)
MAX_TOKENS = 24

BREAKING = {
    "absurd": "no message that is valid here",
    "garbage": "no message that is valid here",
    "truncated": "the stream ended inside a message",
    "oversized": "exceeds the limit|draft_timeout_s",  # a slow machine reads 64 MB too late
    "nested": "no msgpack",
    "unknown": "colour",
    "eof": "closed its pipes",
    "deaf": "closed its pipes",
    "crash": "killed by signal 11",
}
"""Kinds that the drafter process does not survive, and a pattern of the reason given."""
BEARABLE = ["good", "slow", "stale", "noisy"]


def command(kind: str) -> list[str]:
    return [sys.executable, str(HOSTILE), kind]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "t", "llama", seed=1))


@pytest.fixture(scope="module")
def stack(target: str) -> Iterator[RunningStack]:
    """A stack whose drafter is swapped from one program to the next, and has time to answer."""
    settings = StackSettings(
        model=target, draft_backend="ngram", restarts=1000, draft_timeout_s=DEADLINE_S
    )
    with running(settings) as started:
        yield started


@pytest.fixture(scope="module")
def strict(target: str) -> Iterator[RunningStack]:
    """The same without the time: a program that says nothing is found out."""
    settings = StackSettings(
        model=target, draft_backend="ngram", restarts=1000, draft_timeout_s=0.5
    )
    with running(settings) as started:
        yield started


def swap(stack: RunningStack, kind: str) -> None:
    message = SwapDrafter(backend="stdio", command=command(kind))
    name = stack.supervisor.run_dir.path.name
    assert ask_supervisor(name, message, DEADLINE_S) == Done()
    stack.lines.clear()


def deaths(stack: RunningStack) -> str:
    return " ".join(s.note for s in stack.lines if s.role == "drafter" and s.state == "died")


def same_as_plain(stack: RunningStack, mode: Mode, max_tokens: int = MAX_TOKENS) -> None:
    plain = stack.answer(PROMPT, mode="ar", sampling=SAMPLING, max_tokens=max_tokens)
    answer = stack.answer(
        PROMPT, mode=mode, sampling=SAMPLING, max_tokens=max_tokens, num_draft_tokens=4
    )
    assert plain.tokens == answer.tokens
    assert plain.reason == answer.reason


@pytest.mark.parametrize("kind", BEARABLE)
def test_bearable_programs_change_nothing(stack: RunningStack, kind: str) -> None:
    """Wrong, late and stale drafts, and an endless log, cost speed and nothing else."""
    swap(stack, kind)
    same_as_plain(stack, "ssd")
    same_as_plain(stack, "sd")
    assert deaths(stack) == ""


@pytest.mark.parametrize("kind", BREAKING)
def test_breaking_programs_change_nothing(strict: RunningStack, kind: str) -> None:
    """A program that breaks off is replaced, with its reason; the answer is the plain one."""
    swap(strict, kind)
    before = psutil.Process(strict.pid("drafter")).children()

    def found_out() -> bool:
        # A slow machine may first find that it says nothing, or ask for nothing.
        same_as_plain(strict, "sd")
        return re.search(BREAKING[kind], deaths(strict)) is not None

    eventually(found_out, f"{BREAKING[kind]!r} is a reason")
    same_as_plain(strict, "ssd")
    eventually(lambda: gone([child.pid for child in before]), "the program and its guard are gone")


def test_a_program_that_hangs_is_replaced(strict: RunningStack) -> None:
    """A draft that the target waits for has a deadline, named in the reason."""
    lengths = itertools.chain([MAX_TOKENS, 2 * MAX_TOKENS], itertools.repeat(8 * MAX_TOKENS))
    before, reasons = list[int](), []

    def found_out() -> bool:
        # What a program owes to an answer that ends before its deadline is forgotten, and nothing
        # more is asked of it: another one owes to a longer answer.
        swap(strict, "hang")
        before.extend(child.pid for child in psutil.Process(strict.pid("drafter")).children())
        for _ in range(2):
            same_as_plain(strict, "sd", next(lengths))
            reasons.append(deaths(strict))
        return "draft_timeout_s" in " ".join(reasons)

    eventually(found_out, "the hanging program is ended")
    eventually(lambda: gone(before), "the program and its guard are gone")


def test_a_killed_drafter_leaves_no_program(stack: RunningStack) -> None:
    """SIGKILL of the drafter process takes its program with it."""
    swap(stack, "good")
    drafter = psutil.Process(stack.pid("drafter"))
    family = [child.pid for child in drafter.children(recursive=True)]
    assert len(family) == 2
    drafter.kill()
    eventually(lambda: gone(family), "the program and its guard are gone")
    same_as_plain(stack, "ssd")


def test_swapping_back_ends_the_program(stack: RunningStack) -> None:
    """The old drafter's program is gone once another has taken over."""
    swap(stack, "good")
    family = [c.pid for c in psutil.Process(stack.pid("drafter")).children(recursive=True)]
    name = stack.supervisor.run_dir.path.name
    assert ask_supervisor(name, SwapDrafter(backend="ngram"), DEADLINE_S) == Done()
    eventually(lambda: gone(family), "the program and its guard are gone")
    same_as_plain(stack, "ssd")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dies", "ended with exit code 1; its last words: no weights here"),
        ("tokenizer", "must share its tokenizer"),
        ("role", "first message must be a drafter's Hello"),
    ],
)
def test_a_swap_to_a_program_that_cannot_be_is_refused(
    stack: RunningStack, kind: str, words: str
) -> None:
    """The reason comes back, and the old drafter stays."""
    swap(stack, "good")
    old = stack.pid("drafter")
    with pytest.raises(RuntimeFailure, match=words):
        swap(stack, kind)
    assert old == stack.pid("drafter")
    same_as_plain(stack, "ssd")


def test_restarts_have_a_budget(target: str) -> None:
    """A program that never holds is given up; requests go on without a drafter."""
    settings = StackSettings(
        model=target, draft_command=shlex.join(command("crash")), restarts=1, draft_timeout_s=0.5
    )
    with running(settings) as stack:

        def lost() -> bool:
            same_as_plain(stack, "sd")
            return any(s.state == "lost" for s in stack.lines if s.role == "drafter")

        eventually(lost, "the drafter is given up")
        same_as_plain(stack, "ssd")


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"draft_command": "/no/such/drafter --fast"}, UsageError, "/no/such/drafter"),
        ({"draft_command": "'unclosed"}, UsageError, "cannot parse"),
        ({"draft_backend": "stdio"}, UsageError, "needs --draft-command"),
        ({"draft_command": "cat", "draft_backend": "ngram"}, UsageError, "stdio backend"),
        ({"draft_command": "cat", "draft_model": "x"}, UsageError, "in --draft-command"),
        ({"draft_command": "true"}, RuntimeFailure, "'true' ended with exit code 0"),
        ({"draft_command": "yes"}, RuntimeFailure, "no message that is valid"),
        (
            {"draft_command": shlex.join(command("wordless")), "start_timeout_s": 1.5},
            RuntimeFailure,
            "start_timeout_s",
        ),
        (
            {"draft_command": shlex.join(command("tokenizer"))},
            ModelError,
            "must share its tokenizer",
        ),
    ],
)
def test_a_stack_with_an_unusable_program_does_not_start(
    target: str, changes: dict[str, str], kind: type[Exception], words: str
) -> None:
    """What cannot work at all is said at the start, in a sentence, and nothing is left."""
    before = psutil.Process().children(recursive=True)
    settings = msgspec.convert({"model": target, **changes}, StackSettings)
    with pytest.raises(kind, match=words), running(settings):
        pass
    eventually(lambda: gone([c.pid for c in mine(before)]), "no process is left")


def mine(before: list[psutil.Process]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child not in before]
