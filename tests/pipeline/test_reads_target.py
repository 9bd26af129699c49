"""Drafters that read the target, in a stack: lossless, through swaps, deaths and networks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from launch.settings.settings import StackSettings
from launch.stack.control import ask_supervisor
from protocol.messages import Done, Sampling, SwapDrafter, Tokens
from protocol.settings import READING_WAYS, ReadingWay
from services.mlx.loader import load
from services.mlx.target_reader import (
    ReaderDescription,
    flat_parameters,
    new_reader,
    save_reader,
)
from tests.support.reading import feed_loudly
from tests.support.stack import (
    DEADLINE_S,
    Answered,
    RunningStack,
    answer_beside_death,
    answer_beside_swap,
    eventually,
    running,
)
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

PROMPT = "the quick brown fox jumps over"
WIDTH = 64
"""Of the tiny target."""


def write_reading(folder: Path, layers: list[int], way: ReadingWay = "states") -> str:
    """A drafter near the target, with a reader of random weights."""
    write_tiny_model(folder, "llama", seed=1, noise=0.02)
    mx.random.seed(3)
    reader = new_reader(len(layers) * WIDTH, load(folder).module, way)
    if reader.enters_input:
        feed_loudly(reader)
    description = ReaderDescription(layers, WIDTH, way=way)
    save_reader(folder, description, flat_parameters(reader), mx.float32)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("models")
    return {
        "target": str(write_tiny_model(base / "target", "llama", seed=1)),
        "states": write_reading(base / "states", [0, 2]),
        "input": write_reading(base / "input", [0, 2], "input"),
        "unreadable": write_reading(base / "unreadable", [0, 40]),
        "plain": str(write_tiny_model(base / "plain", "llama", seed=1, noise=0.02)),
    }


@pytest.fixture(scope="module", params=READING_WAYS)
def stack(models: dict[str, str], request: pytest.FixtureRequest) -> Iterator[RunningStack]:
    settings = StackSettings(model=models["target"], draft_model=models[request.param])
    with running(settings) as started:
        started.warm_up()
        yield started


def plain(stack: RunningStack, sampling: Sampling) -> Tokens:
    return stack.answer(PROMPT, mode="ar", sampling=sampling, max_tokens=40).tokens


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8, seed=3),
        Sampling(temperature=0.8, seed=4, draft_temperature=0.3),
    ],
    ids=["greedy", "T0.8", "draft-temperature"],
)
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_tokens_are_those_of_plain_decoding(
    stack: RunningStack, mode: str, sampling: Sampling
) -> None:
    """Whatever the drafter makes of what it reads, the answer is the target's."""
    answer = stack.answer(
        PROMPT,
        mode=mode,
        sampling=sampling,
        max_tokens=40,
        num_draft_tokens=3,  # type: ignore[arg-type]
    )
    assert answer.tokens == plain(stack, sampling)


def test_a_drafter_that_dies_is_replaced_in_the_answer(stack: RunningStack) -> None:
    """Its successor gets the states of what is there already, and the answer stays the same."""
    victim = stack.pid("drafter")
    answer = answer_beside_death(stack, "drafter", PROMPT, max_tokens=40, num_draft_tokens=3)
    assert answer.tokens == plain(stack, Sampling())

    def drafts_again() -> Answered:
        return stack.answer(PROMPT, max_tokens=24, num_draft_tokens=3)

    stack.until(lambda a: a.statistics.drafted > 0, "drafts again", drafts_again)
    assert stack.pid("drafter") != victim


def test_swaps_between_drafters_that_read_and_do_not(
    stack: RunningStack, models: dict[str, str]
) -> None:
    """In the middle of an answer, to and fro; a drafter whose layers do not exist drafts, too."""
    expected = plain(stack, Sampling())
    for drafter in ("plain", "states", "unreadable", "input"):
        swap = SwapDrafter(backend="mlx", model=models[drafter])
        answer = answer_beside_swap(stack, swap, PROMPT, max_tokens=40, num_draft_tokens=3)
        assert answer.tokens == expected
        eventually(
            lambda drafter=drafter: reads_nothing(stack) == (drafter == "unreadable"),  # type: ignore[misc]  # bound at once
            "it is known whether the drafter reads the target",
        )


def reads_nothing(stack: RunningStack) -> bool:
    """Whether the status says that the drafter does without the target's states."""
    return "without reading the target" in " ".join(stack.client.status().degraded)


def test_states_reach_a_drafter_in_another_program(
    stack: RunningStack, models: dict[str, str]
) -> None:
    """Through the relay too: read with random weights, they make the drafts worse."""
    expected = plain(stack, Sampling())
    rates = {}
    for drafter in ("input", "plain"):
        server = ["draft-server", "--stdio", "--backend", "mlx", "--model", models[drafter]]
        command = [sys.executable, "-m", "launch.cli", *server]
        message = SwapDrafter(backend="stdio", command=command)
        name = stack.supervisor.run_dir.path.name
        assert ask_supervisor(name, message, DEADLINE_S) == Done()

        def ask() -> Answered:
            return stack.answer(PROMPT, mode="sd", max_tokens=40, num_draft_tokens=3)

        answer = stack.until(lambda a: a.statistics.drafted >= 20, "drafts come in time", ask)
        assert answer.tokens == expected
        rates[drafter] = answer.statistics.acceptance_rate
    assert rates["input"] < rates["plain"]


def test_a_verifier_that_dies_sends_states_again(stack: RunningStack) -> None:
    """The answer goes on, and is the same."""
    answer = answer_beside_death(stack, "verifier", PROMPT, max_tokens=40, num_draft_tokens=3)
    assert answer.tokens == plain(stack, Sampling())
