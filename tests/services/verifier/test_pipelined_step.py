"""Plain decoding in which the next pass begins before it is asked for: the same tokens."""

from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from protocol.messages import (
    CloseSequence,
    FromService,
    OpenSequence,
    Sampling,
    VerificationOutcome,
    Verify,
)
from services.mlx.loader import load
from services.verifier.pipelined_step import PipelinedStep
from services.verifier.verifier import Verifier
from tests.support.reference import SAMPLINGS, plain, tiny_folder
from tests.support.tiny_models import FAMILIES

PROMPT = (11, 200, 5)


class Passes:
    """A model that counts how often it is called."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Asking:
    """One sequence at a verifier that runs ahead."""

    def __init__(self, family: str, sampling: Sampling, number: int = 1) -> None:
        loaded = load(tiny_folder(family))
        self.model = Passes(loaded.module)
        self.verifier = Verifier(loaded._replace(module=self.model), 512)
        self.verifier.pipelines = True
        self.number = number
        self.tokens = list(PROMPT)
        self.idle_ms = 0.0
        """Before the last pass."""
        self.open(number, sampling)

    def open(self, number: int, sampling: Sampling) -> None:
        asked = OpenSequence(sequence=number, tokens=list(PROMPT[:-1]), sampling=sampling)
        list(self.verifier.handle(asked))

    def verify(self, *draft: int, pipelined: bool = True) -> int:
        """The outcome's accepted tokens are added, with the bonus token; returns the passes."""
        before = self.model.count
        asked = Verify(
            sequence=self.number,
            round=len(self.tokens),
            position=len(self.tokens) - 1,
            chain=[self.tokens[-1], *draft],
            pipelined=pipelined,
        )
        outcome: FromService | None = list(self.verifier.handle(asked))[-1]
        assert isinstance(outcome, VerificationOutcome)
        self.idle_ms = outcome.idle_ms
        self.tokens += [*draft[: outcome.accepted], outcome.bonus]
        return self.model.count - before


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_plain_decoding(family: str) -> None:
    asking = Asking(family, Sampling())
    passes = [asking.verify() for _ in range(12)]
    assert plain(family, PROMPT, 12, Sampling()) == asking.tokens[3:]
    assert asking.idle_ms == 0.0
    # The first round runs its own pass and the next one's.
    assert passes == [2] + [1] * 11


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_under_every_way_of_choosing(sampling: Sampling) -> None:
    """As on a GPU, where the choice is made on the device."""
    with patch("services.verifier.acceptance.compute_unit", lambda: "cuda"):
        asking = Asking("llama", sampling)
        passes = [asking.verify() for _ in range(12)]
    assert passes == [2] + [1] * 11
    assert plain("llama", PROMPT, 12, sampling) == asking.tokens[3:]


def test_a_pass_that_nobody_asked_for_changes_nothing() -> None:
    """Drafts, right and wrong, where the bonus token alone had been announced."""
    right = plain("llama", PROMPT, 16, Sampling())
    asking = Asking("llama", Sampling())
    while len(asking.tokens) < 12:
        asking.verify()
        done = len(asking.tokens) - 3
        assert asking.verify(right[done], 7) == 1
    assert right[: len(asking.tokens) - 3] == asking.tokens[3:]


def test_no_pass_is_run_where_it_is_not_announced() -> None:
    asking = Asking("llama", Sampling())
    assert [asking.verify(pipelined=False) for _ in range(3)] == [1, 1, 1]


def test_no_pass_is_run_beside_another_sequence() -> None:
    """They share passes, which is worth more."""
    asking = Asking("llama", Sampling())
    assert asking.verify() == 2
    asking.open(2, Sampling())
    assert [asking.verify(), asking.verify()] == [0, 1]
    list(asking.verifier.handle(CloseSequence(sequence=2)))
    assert asking.verify() == 2
    assert plain("llama", PROMPT, 4, Sampling()) == asking.tokens[3:]


def test_a_choice_that_is_not_a_token_is_discarded() -> None:
    asking = Asking("llama", Sampling())
    asking.verify(pipelined=False)
    sequence = asking.verifier._sequences[1]
    length = sequence.length
    ahead = PipelinedStep(asking.model, sequence.state, mx.array([-1]))
    assert ahead.take_up([asking.tokens[-1]]) is None
    assert ahead.take_up([0, 1]) is None
    assert length == sequence.length
    asking.verify(pipelined=False)
    assert plain("llama", PROMPT, 2, Sampling()) == asking.tokens[3:]
