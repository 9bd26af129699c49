"""Prepared rounds that the verifier begins by itself, in real processes: no token differs."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from launch.settings.settings import StackSettings
from launch.stack.control import ask_supervisor
from protocol.decoding.grammar import json_grammar
from protocol.messages import Done, Generate, LogitsOptions, Sampling, SwapDrafter, Text
from tests.pipeline.test_streams import all_at_once
from tests.support.reference import plain
from tests.support.stack import (
    DEADLINE_S,
    Answered,
    RunningStack,
    answer_beside_death,
    answer_beside_swap,
    eventually,
    restarted_verifier,
    running,
)
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

PROMPT = (0, *[97, 41, 250, 33, 8] * 3, 19, 203, 64)
LENGTH = 150
LONG = 400
SAMPLINGS = {
    "greedy": Sampling(),
    "T0.8": Sampling(temperature=0.8, seed=3),
    "filters": Sampling(temperature=1.0, top_p=0.9, top_k=20, min_p=0.02, seed=4),
    "penalties": Sampling(
        temperature=0.7,
        seed=5,
        logits_options=LogitsOptions(
            repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((33, 2.0), (8, -100.0))
        ),
    ),
    "grammar": Sampling(
        temperature=0.7,
        seed=7,
        logits_options=LogitsOptions(
            grammar=json_grammar({"type": "array", "items": {"type": "integer"}})
        ),
    ),
    "logprobs": Sampling(temperature=0.7, seed=6, logprobs=2),
}
AHEAD: dict[str, Any] = {
    "tokens": list(PROMPT),
    "num_draft_tokens": 3,  # else a tiny target is decoded plainly: drafts do not pay
    "verify_ahead": True,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A target, and a drafter that is close to it."""
    folder = tmp_path_factory.mktemp("pair")
    # A drafter is seldom in time for a target as small as itself.
    target = write_tiny_model(folder / "target", "llama", idle_layers=60)
    draft = write_tiny_model(folder / "draft", "llama", noise=0.02)
    settings = StackSettings(
        model=str(target),
        draft_model=str(draft),
        restarts=1000,
        max_deaths=1000,  # processes are killed beside the same request
        decode_concurrency=4,
    )
    with running(settings) as started:
        yield started


def goes_ahead(answer: Answered) -> bool:
    return answer.statistics.ahead_rounds > 0


def answer_ahead(stack: RunningStack, **request: Any) -> Answered:
    """An answer with a round that began unasked."""
    return stack.until(
        goes_ahead, "a round begins unasked", partial(stack.answer, "", **AHEAD | request)
    )


@pytest.mark.parametrize("law", SAMPLINGS)
@pytest.mark.parametrize("nodes", [0, 8])
def test_tokens_are_those_of_plain_decoding(stack: RunningStack, law: str, nodes: int) -> None:
    """Chains and trees, at both temperatures, whatever is done to logits."""
    sampling = SAMPLINGS[law]
    asked = stack.answer("", tokens=list(PROMPT), mode="ar", sampling=sampling, max_tokens=LENGTH)
    answer = answer_ahead(stack, sampling=sampling, max_tokens=LENGTH, tree_nodes=nodes)
    assert answer.tokens == asked.tokens
    assert answer.statistics.ahead_rounds <= answer.statistics.cache_hits
    assert "idle_ahead" in answer.statistics.phase_ms


def test_where_it_is_forbidden_every_round_is_asked_for(stack: RunningStack) -> None:
    """By the request; and nothing else about it differs."""
    answer = stack.until(
        lambda answer: answer.statistics.cache_hits > 0,
        "a hit",
        partial(stack.answer, "", **AHEAD | {"verify_ahead": False, "max_tokens": LENGTH}),
    )
    assert answer.statistics.ahead_rounds == 0
    assert answer.tokens == plain("llama", PROMPT, LENGTH, Sampling())


def test_drafts_that_were_drawn_wait_for_the_orchestrator(stack: RunningStack) -> None:
    """Under the rejection rule nothing is handed over, whatever the request says."""
    drawn = Sampling(temperature=0.8, seed=3, acceptance="rejection")
    answer = stack.until(
        lambda answer: answer.statistics.cache_hits > 0,
        "a hit",
        partial(stack.answer, "", **AHEAD, sampling=drawn, max_tokens=LENGTH),
    )
    assert len(answer.tokens) == LENGTH
    assert answer.statistics.ahead_rounds == 0


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17])
def test_an_answer_ends_where_its_limit_is(stack: RunningStack, count: int) -> None:
    """In the middle of a draft too."""
    answer = stack.answer("", **AHEAD, max_tokens=count)
    assert answer.tokens == plain("llama", PROMPT, count, Sampling())


def test_a_stop_string_ends_an_answer(stack: RunningStack) -> None:
    """The verifier has begun what nobody wants any more: the next answer is right."""
    whole = stack.answer("", **AHEAD, max_tokens=LENGTH)
    stop = whole.text[len(whole.text) // 2 :][:3]
    assert stop
    plainly = stack.answer("", tokens=list(PROMPT), mode="ar", max_tokens=LENGTH, stop=[stop])
    for _ in range(5):
        answer = stack.answer("", **AHEAD, max_tokens=LENGTH, stop=[stop])
        assert (answer.text, answer.reason) == (plainly.text, plainly.reason)
    answer = answer_ahead(stack, max_tokens=LENGTH)
    assert answer.tokens == plain("llama", PROMPT, LENGTH, Sampling())


def test_a_cancelled_answer_takes_its_rounds_along(stack: RunningStack) -> None:
    """Whatever the verifier has begun of it: the next answer is right."""
    for cut in (2, 20, 60):
        request = Generate(request=stack.client.number(), **AHEAD, max_tokens=LONG)
        answer, tokens = stack.client.generate(request), 0
        while tokens < cut:
            text = next(answer)
            assert isinstance(text, Text)
            tokens += len(text.tokens)
        answer.close()  # cancels
        eventually(lambda: stack.client.status().active == 0, "the request is cancelled")
        after = stack.answer("", **AHEAD, max_tokens=LENGTH)
        assert after.tokens == plain("llama", PROMPT, LENGTH, Sampling())


def test_several_answers_at_once_are_those_of_plain_decoding(stack: RunningStack) -> None:
    """In shared passes, of sequences some of which go on unasked."""
    laws = list(SAMPLINGS.values())[:3]
    asked = [
        Generate(request=0, **AHEAD, sampling=law, max_tokens=LENGTH) for law in (*laws, laws[0])
    ]
    wanted = [plain("llama", PROMPT, LENGTH, one.sampling) for one in asked]

    def went_on() -> bool:
        answers = all_at_once(stack, asked)
        assert [answer.tokens for answer in answers] == wanted
        finished = [answer.finished for answer in answers]
        return any(one is not None and one.statistics.ahead_rounds > 0 for one in finished)

    eventually(went_on, "one of them goes on unasked")


def kill_orchestrator(stack: RunningStack) -> Answered:
    """Once there are ten tokens."""
    alive = [stack.client.status().pid]

    def kill(tokens: int) -> None:
        if tokens > 10 and alive:
            os.kill(alive.pop(), signal.SIGKILL)

    answer = stack.answer("", **AHEAD, max_tokens=LONG, when=kill)
    assert not alive
    return answer


DEATHS: dict[str, Callable[[RunningStack], Answered]] = {
    "verifier": lambda stack: restarted_verifier(stack, "", **AHEAD, max_tokens=LONG),
    "drafter": lambda stack: answer_beside_death(stack, "drafter", "", **AHEAD, max_tokens=LONG),
    "orchestrator": kill_orchestrator,
}


@pytest.mark.parametrize("role", DEATHS)
def test_an_answer_survives_whoever_dies(stack: RunningStack, role: str) -> None:
    """What was committed is the truth; the statistics count rounds that began unasked."""
    answer = stack.until(goes_ahead, "rounds begin unasked", partial(DEATHS[role], stack))
    assert answer.tokens == plain("llama", PROMPT, LONG, Sampling())


def test_an_answer_survives_a_swap(stack: RunningStack) -> None:
    """Another drafter goes on in the middle of an answer: no other token."""
    stack.pid("drafter")  # the next one, if the last test's is not back yet
    drafter = next(s.model for s in stack.client.status().services if s.role == "drafter")
    name = stack.supervisor.run_dir.path.name

    def swapped() -> Answered:
        back = SwapDrafter(backend="mlx", model=drafter)
        assert ask_supervisor(name, back, DEADLINE_S) == Done()
        answer_ahead(stack, max_tokens=LENGTH)
        return answer_beside_swap(stack, SwapDrafter(backend="ngram"), "", **AHEAD, max_tokens=LONG)

    answer = stack.until(goes_ahead, "rounds begin unasked", swapped)
    assert answer.tokens == plain("llama", PROMPT, LONG, Sampling())
