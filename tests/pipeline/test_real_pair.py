"""The real pair: grammars, trees, a core that is lent, acceptance and hits; deaths: test_smoke."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from launch.models.pair import pair_of
from launch.prompts import chosen_prompts
from launch.settings.machine import share_cores
from launch.settings.settings import StackSettings
from orchestrator.sequence.limits import Limits
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.grammar import json_grammar
from protocol.messages import ChatMessage, LogitsOptions, Sampling
from services.drafter.backends.mlx import MlxBackend
from services.mlx.loader import load
from services.runtime.idle_flag import IdleFlag
from services.verifier.verifier import Verifier
from tests.support.lockstep import Lockstep
from tests.support.stack import (
    RunningStack,
    eventually,
    running,
)

pytestmark = [pytest.mark.processes, pytest.mark.model]

PROMPT = "Give me four tips for growing tomatoes on a balcony."
SAMPLING = Sampling(temperature=0.7, seed=5)
MAX_TOKENS = 48
CHAT = [prompt.prompt for prompt in chosen_prompts(None, 0) if prompt.category == "chat"]


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with running(StackSettings(restarts=1000)) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(stack: RunningStack) -> list[int]:
    return stack.answer(PROMPT, mode="ar", sampling=SAMPLING, max_tokens=MAX_TOKENS).tokens


class Once:
    """Does something the first time that enough tokens have come."""

    def __init__(self, tokens: int, action: Callable[[], None]) -> None:
        self._tokens = tokens
        self._action = action
        self.done = False

    def __call__(self, tokens: int) -> None:
        if tokens >= self._tokens and not self.done:
            self.done = True
            self._action()


# While the stack still has the drafter that it began with.
def test_a_schema_and_penalties_cost_no_token(stack: RunningStack) -> None:
    """With a trimmed draft head and a real vocabulary: same tokens, drafts are still accepted."""
    schema = {
        "type": "object",
        "properties": {
            "tips": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 4}
        },
        "required": ["tips"],
        "additionalProperties": False,
    }
    shape = LogitsOptions(
        grammar=json_grammar(schema), repetition_penalty=1.1, frequency_penalty=0.1
    )
    sampling = Sampling(temperature=0.7, seed=5, logits_options=shape, logprobs=0)
    plain = stack.answer(PROMPT, mode="ar", sampling=sampling, max_tokens=MAX_TOKENS)
    fast = stack.until(
        lambda answer: answer.statistics.accepted > 0,
        "drafts come in time",
        partial(stack.answer, PROMPT, sampling=sampling, max_tokens=MAX_TOKENS, num_draft_tokens=3),
    )
    assert plain.tokens == fast.tokens
    assert plain.text.lstrip().startswith("{")


def test_trees_cost_no_token(stack: RunningStack, undisturbed: list[int]) -> None:
    """At T = .7, with runners-up that grow on: same tokens, and branches of trees among them."""
    answer = stack.until(
        lambda answer: answer.statistics.branch_tokens > 0,
        "a side branch is accepted",
        partial(
            stack.answer,
            PROMPT,
            sampling=SAMPLING,
            max_tokens=MAX_TOKENS,
            num_draft_tokens=4,
            tree_nodes=12,
        ),
    )
    assert undisturbed == answer.tokens
    assert answer.statistics.tree_rounds > 0


@pytest.mark.skipif(not share_cores("mlx").drafter, reason="no core is shared out here")
def test_a_drafter_may_die_while_its_core_is_lent(
    stack: RunningStack, undisturbed: list[int]
) -> None:
    """SIGKILL when it has nothing to do in a round: same tokens, and the next one lends it too."""
    flag, old = IdleFlag(str(stack.supervisor.run_dir.idle_flag("drafter"))), stack.pid("drafter")

    def die() -> None:
        eventually(lambda: flag.is_idle, "the drafter has nothing to do")
        os.kill(old, signal.SIGKILL)

    disturb = Once(8, die)
    fixed = partial(stack.answer, PROMPT, sampling=SAMPLING, num_draft_tokens=3)
    answer = fixed(max_tokens=MAX_TOKENS, when=disturb)
    assert disturb.done
    assert undisturbed == answer.tokens
    eventually(lambda: has_other(stack, "drafter", old), "a new drafter")
    flag.is_idle = False
    assert undisturbed == fixed(max_tokens=MAX_TOKENS).tokens
    eventually(lambda: flag.is_idle, "the new drafter has nothing to do")


def test_drafts_are_accepted_and_hit() -> None:
    """With a fixed lookahead, trees in time: hit rate above 0.4, mean length above 1.8."""
    pair = pair_of(StackSettings())
    verifier = Verifier(load(Path(pair.model)), 512)
    drafter = MlxBackend(Path(pair.draft_model), 512)
    tokenizer = TargetTokenizer(Path(pair.model))
    limits = Limits(48, tokenizer.stop_ids, 0)
    prompts = [tokenizer.encode([ChatMessage("user", text)]) for text in CHAT]
    answers = [
        Lockstep(verifier, drafter, prompt, limits, num_draft_tokens=6, sampling=Sampling()).run()
        for prompt in prompts
    ]
    hits = sum(s.cache_hits for s in answers)
    assert hits / sum(s.cache_hits + s.cache_misses for s in answers) > 0.4
    assert 1 + sum(s.accepted for s in answers) / sum(s.rounds for s in answers) > 1.8


def has_other(stack: RunningStack, role: str, old: int) -> bool:
    """Whether the role has a process again, and not the old one."""
    return any(s.role == role and s.pid != old for s in stack.client.status().services)
