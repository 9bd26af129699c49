"""The real pair: every mode, backend and temperature gives the tokens of plain decoding."""

from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest

from launch.models.pair import pair_of
from launch.settings.settings import BackendChoice, StackSettings
from launch.workers.reference import ReferenceWorker
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.jobs.reference import LARGEST_TIE
from protocol.messages import ChatMessage, Mode, Sampling, Tokens
from tests.support.stack import RunningStack, running

pytestmark = [pytest.mark.processes, pytest.mark.model]

PROMPTS = {
    "chat": "Describe a quiet morning in a mountain village.",
    "code": "Write a Python function that adds the even numbers of a list.",
    "echo": "Repeat this sentence three times: the blue bird sings in the old tree.",
}
MAX_TOKENS = 24
SAMPLINGS = {
    "greedy": Sampling(),
    "T0.7": Sampling(temperature=0.7, seed=11),
    "T1": Sampling(temperature=1.0, seed=12),
    "T0.9-filtered": Sampling(temperature=0.9, top_p=0.9, top_k=40, min_p=0.02, seed=13),
}


@pytest.fixture(scope="module", params=["mlx", "ngram"])
def stack(request: pytest.FixtureRequest) -> Iterator[RunningStack]:
    backend: BackendChoice = request.param
    with running(StackSettings(draft_backend=backend)) as started:
        yield started


PLAIN: dict[tuple[str, str], Tokens] = {}
"""Plain decoding does not depend on the drafter: computed once for all backends."""


def plain(stack: RunningStack, prompt: str, law: str) -> Tokens:
    if (prompt, law) not in PLAIN:
        answer = stack.answer(
            PROMPTS[prompt], mode="ar", sampling=SAMPLINGS[law], max_tokens=MAX_TOKENS
        )
        PLAIN[prompt, law] = answer.tokens
    return PLAIN[prompt, law]


@cache
def tokenizer() -> TargetTokenizer:
    return TargetTokenizer(Path(pair_of(StackSettings(draft_backend="ngram")).model))


@pytest.mark.parametrize(("law", "prompt"), list(zip(SAMPLINGS, cycle(PROMPTS), strict=False)))
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_tokens_are_those_of_plain_decoding(
    stack: RunningStack, mode: Mode, prompt: str, law: str
) -> None:
    """Speculation changes no token; a difference may only stand at a rounding tie."""
    sampling = SAMPLINGS[law]
    expected = plain(stack, prompt, law)
    answer = stack.answer(PROMPTS[prompt], mode=mode, sampling=sampling, max_tokens=MAX_TOKENS)
    if expected != answer.tokens:
        pairs = enumerate(zip(expected, answer.tokens, strict=False))
        at = next(i for i, (a, b) in pairs if a != b)
        prefix = tokenizer().encode([ChatMessage("user", PROMPTS[prompt])]) + expected[:at]
        with ReferenceWorker(pair_of(StackSettings(draft_backend="ngram"))) as yardstick:
            margin = yardstick.margin(prefix, (expected[at], answer.tokens[at]), sampling).margin
        assert margin < LARGEST_TIE, f"token {at} differs at a logit margin of {margin:.2g}"
