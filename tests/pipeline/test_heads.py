"""Published heads in a stack: lossless, through swaps, deaths, and without the target's states."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.settings.settings import StackSettings
from protocol.decoding.grammar import json_grammar
from protocol.messages import LogitsOptions, Sampling, SwapDrafter, Tokens
from tests.support.stack import (
    Answered,
    RunningStack,
    answer_beside_death,
    answer_beside_swap,
    running,
)
from tests.support.tiny_models import vocabulary_size, write_tiny_model
from tests.support.write_heads import dflash, eagle3, mtp, write_head

pytestmark = pytest.mark.processes

PROMPT = "the quick brown fox jumps over"
FORMATS = {"eagle3": "llama", "mtp": "qwen3_5", "dspark": "qwen3"}
"""And the family of the target. The other formats of blocks are drafted from in one process."""


def write_pair(base: Path, name: str) -> tuple[Path, Path]:
    """A tiny target and a head of this format for it."""
    target = write_tiny_model(base / "target", FORMATS[name], seed=1)
    config = json.loads((target / "config.json").read_text("utf-8"))
    match name:
        case "eagle3":
            config, tensors = eagle3(vocabulary_size(), layers=[1, 2, 3], trimmed=100)
        case "mtp":
            tensors = mtp()
        case _:
            config, tensors = dflash(vocabulary_size(), name, layers=[0, 2], count=3)
    return target, write_head(base / "head", config, tensors)


@pytest.fixture(scope="module", params=FORMATS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("heads"), request.param)


@pytest.fixture(scope="module")
def stack(pair: tuple[Path, Path]) -> Iterator[RunningStack]:
    target, head = pair
    with running(StackSettings(model=str(target), draft_model=str(head))) as started:
        started.warm_up()
        yield started


def plain(stack: RunningStack, sampling: Sampling) -> Tokens:
    return stack.answer(PROMPT, mode="ar", sampling=sampling, max_tokens=40).tokens


def drafter_of(stack: RunningStack) -> str:
    return next(s.backend for s in stack.client.status().services if s.role == "drafter")


PENALTIES = LogitsOptions(
    repetition_penalty=1.3, presence_penalty=0.4, logit_bias=((7, 3.0), (9, -100.0))
)


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [
        ("sd", Sampling()),
        ("ssd", Sampling()),
        ("ssd", Sampling(temperature=0.7, seed=3)),
        ("sd", Sampling(temperature=0.7, seed=4, draft_temperature=0.3)),
        ("ssd", Sampling(temperature=0.7, seed=5, logits_options=PENALTIES)),
    ],
    ids=["sd-greedy", "ssd-greedy", "ssd-T0.7", "sd-draft-temperature", "ssd-penalties"],
)
def test_tokens_are_those_of_plain_decoding(
    stack: RunningStack, mode: str, sampling: Sampling
) -> None:
    """Whatever the head makes of what it reads, the answer is the target's."""
    assert drafter_of(stack) == "head"
    answer = stack.answer(
        PROMPT,
        mode=mode,
        sampling=sampling,
        max_tokens=40,
        num_draft_tokens=3,  # type: ignore[arg-type]
    )
    assert answer.tokens == plain(stack, sampling)
    assert stack.client.status().degraded == []
    assert answer.statistics.drafter == "head head"
    assert answer.statistics.state_bytes > 0


def test_trees_change_no_token(stack: RunningStack, pair: tuple[Path, Path]) -> None:
    """With penalties and noise; a target with recurrent layers verifies chains of them."""
    sampling = Sampling(temperature=0.7, seed=6, logits_options=PENALTIES)
    expected = plain(stack, sampling)
    forks = "qwen3_5" not in (pair[0] / "config.json").read_text("utf-8")

    def ask() -> Answered:
        return stack.answer(
            PROMPT, sampling=sampling, max_tokens=40, num_draft_tokens=3, tree_nodes=8
        )

    answer = stack.until(
        lambda a: bool(a.statistics.tree_rounds if forks else a.statistics.drafted),
        "drafts come in time",
        ask,
    )
    assert answer.tokens == expected
    assert forks or not answer.statistics.tree_rounds


def test_a_grammar_holds(stack: RunningStack) -> None:
    """The head drafts under it, and the answer is that of plain decoding."""
    grammar = json_grammar({"type": "array", "items": {"type": "integer"}, "maxItems": 4})
    sampling = Sampling(logits_options=LogitsOptions(grammar=grammar))
    answer = stack.answer(PROMPT, sampling=sampling, max_tokens=40, num_draft_tokens=3)
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


def test_a_verifier_that_dies_sends_states_again(stack: RunningStack) -> None:
    """The answer goes on, and is the same."""
    answer = answer_beside_death(stack, "verifier", PROMPT, max_tokens=40, num_draft_tokens=3)
    assert answer.tokens == plain(stack, Sampling())


def test_swaps_in_the_middle_of_an_answer(stack: RunningStack, pair: tuple[Path, Path]) -> None:
    """To a head in another program, to one without a model, and back."""
    target, head = pair
    expected = plain(stack, Sampling())
    server = ["draft-server", "--stdio", "--backend", "head", "--model", str(head)]
    command = [sys.executable, "-m", "launch.cli", *server, "--target", str(target)]
    for swap in (
        SwapDrafter(backend="ngram"),
        SwapDrafter(backend="stdio", command=command),
        SwapDrafter(backend="mlx", model=str(head)),
    ):
        answer = answer_beside_swap(stack, swap, PROMPT, max_tokens=40, num_draft_tokens=3)
        assert answer.tokens == expected
    assert drafter_of(stack) == "head"
