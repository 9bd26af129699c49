"""The real pair in one stack with its HTTP gateway: the part of the pipeline in `make test`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from launch.settings.settings import StackSettings
from protocol.messages import Mode, Sampling, SwapDrafter, Tokens
from tests.support.stack import (
    DEADLINE_S,
    RunningStack,
    answer_beside_death,
    answer_beside_swap,
    eventually,
    restarted_verifier,
    running,
)

PROMPT = "Give me four tips for growing tomatoes on a balcony."
MAX_TOKENS = 32
SAMPLINGS = {"greedy": Sampling(), "T0.7": Sampling(temperature=0.7, seed=5)}


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    """Leaves finding a port to the system."""
    with running(StackSettings(http=True, port=0, restarts=1000)) as started:
        yield started


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    assert stack.supervisor.listener is not None
    url = f"{stack.supervisor.listener.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as one:
        yield one


@pytest.fixture(scope="module")
def plain(stack: RunningStack) -> dict[str, Tokens]:
    """The tokens of plain decoding, by sampling."""
    return {
        name: stack.answer(PROMPT, mode="ar", sampling=sampling, max_tokens=MAX_TOKENS).tokens
        for name, sampling in SAMPLINGS.items()
    }


def test_the_first_answer_is_planned_from_times_at_load(stack: RunningStack) -> None:
    """Both models were timed before anything was drafted."""
    eventually(lambda: stack.client.status().is_prepared, "it is prepared")
    statistics = stack.answer(PROMPT, mode="ssd", max_tokens=1).statistics
    assert not statistics.drafted
    assert statistics.planned is not None
    assert statistics.planned.draft_ms > 0.0
    assert statistics.planned.pass_ms[1] > 0.0


@pytest.mark.parametrize("law", SAMPLINGS)
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_speculation_changes_no_token(
    stack: RunningStack, plain: dict[str, Tokens], mode: Mode, law: str
) -> None:
    """Drafts are accepted, and the tokens are those of plain decoding."""
    answer = stack.until(
        lambda one: one.statistics.accepted > 0,
        "drafts come in time",
        lambda: stack.answer(
            PROMPT,
            mode=mode,
            sampling=SAMPLINGS[law],
            max_tokens=MAX_TOKENS,
            num_draft_tokens=3,
        ),
    )
    assert plain[law] == answer.tokens


def test_http_streams_the_same_text(
    stack: RunningStack, client: openai.OpenAI, plain: dict[str, Tokens]
) -> None:
    """The parts of a streamed answer are the text of plain decoding."""
    del plain
    expected = stack.answer(PROMPT, mode="ar", max_tokens=MAX_TOKENS).text
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
    )
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == expected
    assert len(parts) > 1


def test_two_requests_at_once(client: openai.OpenAI) -> None:
    """Each gets the text that it gets alone."""
    prompts = ["Name three rivers.", "What is 7 times 8?"]

    def ask(prompt: str) -> str | None:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=24,
            temperature=0.7,
            seed=3,
        )
        return answer.choices[0].message.content

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_a_killed_drafter_costs_no_token(stack: RunningStack, plain: dict[str, Tokens]) -> None:
    """SIGKILL in mid-answer: same tokens, and another drafter comes."""
    old = stack.pid("drafter")
    answer = answer_beside_death(
        stack, "drafter", PROMPT, sampling=SAMPLINGS["T0.7"], max_tokens=MAX_TOKENS
    )
    assert plain["T0.7"] == answer.tokens
    eventually(lambda: stack.pid("drafter") != old, "a new drafter")


def test_a_killed_verifier_costs_no_token(stack: RunningStack, plain: dict[str, Tokens]) -> None:
    """SIGKILL in mid-answer: the answer goes on after the restart, unchanged."""
    answer = restarted_verifier(stack, PROMPT, sampling=SAMPLINGS["T0.7"], max_tokens=MAX_TOKENS)
    assert plain["T0.7"] == answer.tokens


def test_a_swapped_drafter_costs_no_token(stack: RunningStack, plain: dict[str, Tokens]) -> None:
    """Another backend takes over while a request streams: same tokens."""
    answer = answer_beside_swap(
        stack,
        SwapDrafter(backend="ngram"),
        PROMPT,
        sampling=SAMPLINGS["T0.7"],
        max_tokens=MAX_TOKENS,
    )
    assert plain["T0.7"] == answer.tokens


def test_the_command_line_answers(plain: dict[str, Tokens]) -> None:
    """`ssd generate` starts a stack of its own and prints the same tokens."""
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "generate", PROMPT, "--json", "-m", str(MAX_TOKENS)],
        capture_output=True,
        timeout=4 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["tokens"] == plain["greedy"]
