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
from services.drafter.backends.ngram import NgramBackend
from services.mlx.loader import load
from services.verifier.verifier import Verifier
from tests.support.families.layered import LAYERED, RECURRENT_DRAFTERS
from tests.support.lockstep import Lockstep
from tests.support.reference import plain, tiny_folder
from tests.support.stack import RunningStack, answer_beside_death, restarted_verifier, running
from tests.support.tiny_models import write_tiny_model

PROMPT = (0, *[97, 41, 250, 33, 8] * 3, 19, 203, 64)
LENGTH = 44
LONG = 400
"""Tokens that take long enough for a process to be killed meanwhile."""
SAMPLINGS = {"greedy": Sampling(), "T0.7": Sampling(temperature=0.7, seed=5)}


class Target(NamedTuple):
    """A stack and the family of its target."""

    family: str
    stack: RunningStack


@cache
def verifier_of(family: str) -> Verifier:
    return Verifier(load(tiny_folder(family)), 512)


def run(family: str, backend: DraftBackend, sampling: Sampling) -> Statistics:
    """In this process, trees always in time; the answer is checked."""
    limits = Limits(LENGTH, frozenset(), 0)
    line = Lockstep(
        verifier_of(family), backend, list(PROMPT), limits, num_draft_tokens=3, sampling=sampling
    )
    statistics = line.run()
    assert line.sequence.tokens[len(PROMPT) :] == plain(family, PROMPT, LENGTH, sampling)
    return statistics


@pytest.mark.parametrize("law", SAMPLINGS)
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", *RECURRENT_DRAFTERS])
def test_a_model_drafts_for_itself(family: str, law: str) -> None:
    """By other means: all rows of sliding layers, or a batch of recurrent states."""
    statistics = run(family, MlxBackend(tiny_folder(family), 512), SAMPLINGS[law])
    assert statistics.rounds < LENGTH / 2


@pytest.mark.parametrize("family", LAYERED)
def test_ngram_drafts_for_every_family(family: str) -> None:
    law = "greedy" if len(family) % 2 else "T0.7"
    run(family, NgramBackend(), SAMPLINGS[law])


@pytest.fixture(scope="module", params=["qwen3_5", "jamba"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    """Its drafter is a model of another family."""
    draft = write_tiny_model(tmp_path_factory.mktemp("draft") / "llama", "llama")
    model: Path = tiny_folder(request.param)
    settings = StackSettings(model=str(model), draft_model=str(draft), restarts=1000)
    with running(settings) as stack:
        yield Target(request.param, stack)


@pytest.mark.processes
@pytest.mark.parametrize("law", SAMPLINGS)
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_a_stack_gives_the_tokens_of_plain_decoding(target: Target, mode: Mode, law: str) -> None:
    answer = target.stack.answer(
        "", tokens=list(PROMPT), mode=mode, sampling=SAMPLINGS[law], max_tokens=LENGTH
    )
    assert answer.tokens == plain(target.family, PROMPT, LENGTH, SAMPLINGS[law])
    assert "recurrent" in answer.statistics.rewinding
    assert answer.statistics.emulated_cost == ""


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
