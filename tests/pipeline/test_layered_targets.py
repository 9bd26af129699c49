"""Targets with windows and recurrent states: every mode and drafter gives their own tokens."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from launch.settings.settings import StackSettings
from orchestrator.sequence.limits import Limits
from protocol.messages import Mode, Sampling, Statistics
from services.drafter.backends.base import DraftBackend
from services.drafter.backends.mlx import MlxBackend
from services.verifier.verifier import Verifier
from tests.services.drafter.lookup_backend import LookupBackend
from tests.support.families.layered import RECURRENT_DRAFTERS
from tests.support.lockstep import Lockstep
from tests.support.reference import plain, tiny_folder, tiny_verifier
from tests.support.stack import (
    Answered,
    RunningStack,
    answer_beside_death,
    restarted_verifier,
    running,
)
from tests.support.tiny_models import write_tiny_model

PROMPT = (0, *[97, 41, 250, 33, 8] * 3, 19, 203, 64)
LENGTH = 44
REPRESENTATIVES = ("qwen3_5", "lfm2", "granite4", "falcon_h1", "jamba", "gpt_oss", "llama4")
"""One family of each kind of state."""
BRANCHES = 8
"""So few that the rounds of all are planned beforehand."""
LONG = 400
"""Tokens that take long enough for a process to be killed meanwhile."""
SAMPLINGS = {"greedy": Sampling(), "T0.7": Sampling(temperature=0.7, seed=5)}


class Target(NamedTuple):
    """A stack, the family of its target, and that of its drafter."""

    family: str
    drafter: str
    stack: RunningStack


@cache
def verifier_of(family: str) -> Verifier:
    return tiny_verifier(family)


def run(family: str, backend: DraftBackend, sampling: Sampling) -> Statistics:
    """In this process, trees always in time; the answer is checked."""
    line = Lockstep(
        verifier_of(family),
        backend,
        list(PROMPT),
        Limits(LENGTH, frozenset(), 0),
        num_draft_tokens=3,
        sampling=sampling,
        branches=BRANCHES,
    )
    statistics = line.run()
    assert line.sequence.tokens[len(PROMPT) :] == plain(family, PROMPT, LENGTH, sampling)
    return statistics


@pytest.mark.parametrize("law", SAMPLINGS)
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", *RECURRENT_DRAFTERS])
def test_a_model_drafts_for_itself(family: str, law: str) -> None:
    """By other means: all rows of sliding layers, or a batch of recurrent states."""
    backend = MlxBackend(tiny_folder(family), 512)
    statistics = run(family, backend, SAMPLINGS[law])
    assert statistics.rounds < LENGTH / 2
    assert statistics.cache_hits > 0


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_ngram_drafts_for_every_kind(family: str) -> None:
    law = "greedy" if len(family) % 2 else "T0.7"
    run(family, LookupBackend(), SAMPLINGS[law])


STACKS = (
    ("qwen3_5", "llama"),
    ("jamba", "llama"),
    ("lfm2", "lfm2"),
    ("gemma3", "gemma3"),
)
"""Targets that replay, are fed again, have windows; with a drafter of another family, or one that
is like the target."""

AGAIN = "recurrent states are recomputed from recorded inputs"
WAYS = {
    "qwen3_5": AGAIN,
    "lfm2": AGAIN,
    "jamba": "accepted tokens are fed again after a rejection",
    "gemma3": "rejected tokens are cut off",
}
"""How they go back, in words; what fails at load is done in a slower way."""


def settings_of(family: str, drafter: str, folder: Path) -> StackSettings:
    model: Path = tiny_folder(family)
    noise = 0.01 if drafter == family else 0.0
    draft = write_tiny_model(folder / drafter, drafter, noise=noise)
    return StackSettings(model=str(model), draft_model=str(draft), restarts=1000)


@pytest.fixture(scope="module", params=STACKS, ids="-".join)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    with running(settings_of(*request.param, tmp_path_factory.mktemp("draft"))) as stack:
        yield Target(*request.param, stack)


@pytest.mark.processes
@pytest.mark.parametrize("law", SAMPLINGS)
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_a_stack_gives_the_tokens_of_plain_decoding(target: Target, mode: Mode, law: str) -> None:
    answer = target.stack.answer(
        "", tokens=list(PROMPT), mode=mode, sampling=SAMPLINGS[law], max_tokens=LENGTH
    )
    assert answer.tokens == plain(target.family, PROMPT, LENGTH, SAMPLINGS[law])
    assert answer.statistics.rewinding.endswith(WAYS[target.family])


@pytest.mark.processes
def test_what_is_drafted_is_verified(target: Target) -> None:
    """And stands where the drafter is like the target."""
    expected = plain(target.family, PROMPT, 2 * LENGTH, Sampling())

    def verified(answer: Answered) -> bool:
        assert answer.tokens == expected
        found = answer.statistics
        return (found.accepted if target.drafter == target.family else found.drafted) > 0

    def ask() -> Answered:
        return target.stack.answer(
            "", tokens=list(PROMPT), max_tokens=len(expected), num_draft_tokens=3
        )

    target.stack.until(verified, "drafts come in time", ask)


@pytest.mark.processes
def test_an_answer_survives_its_verifier(target: Target) -> None:
    """A new process computes the state again, and the answer goes on."""
    answer = restarted_verifier(target.stack, "", tokens=list(PROMPT), max_tokens=LONG)
    assert answer.tokens == plain(target.family, PROMPT, LONG, Sampling())


@pytest.mark.processes
def test_an_answer_survives_its_drafter(target: Target) -> None:
    """What was drafted and never verified leaves nothing in the state."""
    answer = answer_beside_death(
        target.stack, "drafter", "", tokens=list(PROMPT), max_tokens=LONG, num_draft_tokens=3
    )
    assert answer.tokens == plain(target.family, PROMPT, LONG, Sampling())
