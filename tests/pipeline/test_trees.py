"""Trees in a running stack: the tokens of plain decoding, whatever is done to logits, and whoever
dies or misbehaves meanwhile."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.settings.settings import StackSettings
from launch.stack.control import ask_supervisor
from protocol.messages import Done, LogitsOptions, Mode, Sampling, SwapDrafter
from tests.support.reference import plain, tiny_folder
from tests.support.stack import (
    DEADLINE_S,
    Answered,
    RunningStack,
    answer_beside_death,
    answer_beside_swap,
    restarted_verifier,
    running,
)
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

HOSTILE = Path(__file__).parents[1] / "support" / "hostile_drafter.py"
PROMPT = (0, *[97, 41, 250, 33, 8] * 3, 19, 203, 64)
FAMILY = "gemma3"
"""It has windows and layers that see all."""
SAMPLINGS = {
    "greedy": Sampling(),
    "T0.7": Sampling(temperature=0.7, seed=5),
    "filters": Sampling(temperature=1.0, top_p=0.9, top_k=20, min_p=0.02, seed=4),
    "penalties": Sampling(
        temperature=0.7,
        seed=5,
        logits_options=LogitsOptions(
            repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((33, 2.0), (8, -100.0))
        ),
    ),
}
LENGTH = 44
LONG = 400
"""Tokens that take long enough for a process to be killed meanwhile."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A target, and a drafter that is close to it."""
    draft = write_tiny_model(tmp_path_factory.mktemp("draft") / FAMILY, FAMILY, noise=0.1)
    settings = StackSettings(model=str(tiny_folder(FAMILY)), draft_model=str(draft), restarts=1000)
    with running(settings) as started:
        yield started


@pytest.mark.parametrize("law", SAMPLINGS)
def test_trees_change_no_token(stack: RunningStack, law: str) -> None:
    """Trees of a fixed size are verified, and the answer is that of plain decoding."""
    sampling = SAMPLINGS[law]
    expected = stack.answer(
        "", tokens=list(PROMPT), mode="ar", sampling=sampling, max_tokens=LENGTH
    ).tokens
    if sampling.logits_options is None:
        assert expected == plain(FAMILY, PROMPT, LENGTH, sampling)
    for mode, nodes in (("ssd", 4), ("ssd", 12), ("sd", 8)):
        answer = answer_by_trees(stack, nodes, sampling, mode)
        assert answer.tokens == expected
        assert answer.statistics.branch_tokens <= answer.statistics.accepted


def answer_by_trees(
    stack: RunningStack, nodes: int, sampling: Sampling, mode: Mode = "ssd"
) -> Answered:
    """An answer with a tree in it: a drafter that is starting has none yet."""
    return stack.until(
        lambda answer: answer.statistics.tree_rounds > 0,
        "a tree is verified",
        lambda: stack.answer(
            "",
            tokens=list(PROMPT),
            mode=mode,
            sampling=sampling,
            max_tokens=LENGTH,
            num_draft_tokens=4,  # else a tiny target is decoded plainly: drafts do not pay
            tree_nodes=nodes,
        ),
    )


LONG_TREES: dict[str, Any] = {
    "tokens": list(PROMPT), "max_tokens": LONG, "num_draft_tokens": 3, "tree_nodes": 8,
}  # fmt: skip


def test_an_answer_survives_a_verifier_with_a_tree_in_flight(stack: RunningStack) -> None:
    """What was committed is the truth: a new process goes on from there."""
    answer = restarted_verifier(stack, "", **LONG_TREES)
    assert answer.tokens == plain(FAMILY, PROMPT, LONG, Sampling())


def test_an_answer_survives_a_drafter_with_a_tree_in_flight(stack: RunningStack) -> None:
    """It goes on without, and then with the next one."""
    answer = answer_beside_death(stack, "drafter", "", **LONG_TREES)
    assert answer.tokens == plain(FAMILY, PROMPT, LONG, Sampling())


def test_an_answer_survives_a_swap_with_a_tree_in_flight(stack: RunningStack) -> None:
    """Another drafter goes on in the middle of an answer of trees: no other token."""
    stack.pid("drafter")  # the next one, if the last test's is not back yet
    drafter = next(s.model for s in stack.client.status().services if s.role == "drafter")
    name = stack.supervisor.run_dir.path.name

    def swapped() -> Answered:
        back = SwapDrafter(backend="mlx", model=drafter)
        assert ask_supervisor(name, back, DEADLINE_S) == Done()
        answer_by_trees(stack, 8, Sampling())
        return answer_beside_swap(stack, SwapDrafter(backend="ngram"), "", **LONG_TREES)

    answer = stack.until(lambda a: a.statistics.tree_rounds > 0, "trees come in time", swapped)
    assert answer.tokens == plain(FAMILY, PROMPT, LONG, Sampling())


def test_trees_that_are_none_cost_no_token() -> None:
    """A program that says it drafts trees, and sends anything: the request goes on."""
    settings = StackSettings(
        model=str(tiny_folder("llama")),
        draft_backend="stdio",
        draft_command=shlex.join([sys.executable, str(HOSTILE), "forked"]),
        restarts=1000,
        draft_timeout_s=DEADLINE_S,
    )
    with running(settings) as started:
        answer = started.answer("", tokens=list(PROMPT), max_tokens=LENGTH, tree_nodes=8)
    assert answer.tokens == plain("llama", PROMPT, LENGTH, Sampling())
