"""Plain decoding that runs free, the next pass begun before its token is read: the same tokens."""

from collections import deque
from functools import cache
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from protocol.decoding.token_tree import read_tree
from protocol.messages import (
    CloseSequence,
    Extend,
    LogitsOptions,
    OpenSequence,
    Revoke,
    Sampling,
    VerificationOutcome,
    Verify,
)
from services.engine.scheduler import follow
from services.engine.target_model import TargetModel
from services.kernels.register import KERNELS
from services.mlx.loader import LoadedModel, load
from services.verifier.verifier import Verifier
from tests.services.runtime.steps import at_once
from tests.support.reference import SAMPLINGS, plain, prepare_shared, tiny_folder
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


@cache
def counted(family: str) -> tuple[LoadedModel, TargetModel | None]:
    """A model whose passes are counted."""
    loaded = load(tiny_folder(family))
    loaded = loaded._replace(module=Passes(loaded.module))
    return loaded, prepare_shared(loaded.module)


class Asking:
    """One sequence at a verifier that runs ahead."""

    def __init__(self, family: str, sampling: Sampling, number: int = 1) -> None:
        # A replay of a trace does not call the model, and could not be counted.
        with patch("services.engine.target_model.trace_if_faster", lambda *_, **__: at_once(None)):
            loaded, target = counted(family)
            self.verifier = Verifier(loaded, 512, target=target)
        self.model: Passes = loaded.module
        self.verifier.scheduler.pipelines = True
        self.number = number
        self.tokens = list(PROMPT)
        self.idle_ms = 0.0
        """Before the last pass."""
        self.open(number, sampling)
        self.model.count = 0

    def open(self, number: int, sampling: Sampling) -> None:
        asked = OpenSequence(sequence=number, tokens=list(PROMPT[:-1]), sampling=sampling)
        list(self.verifier.handle(asked))

    def verify(self, *draft: int, granted: int = 0, revoke_after: int = 0) -> list[bool]:
        """All tokens of the outcomes are added; returns whether each went on.

        The tokens are revoked after so many outcomes, if any.
        """
        asked = Verify(
            sequence=self.number,
            round=len(self.tokens),
            position=len(self.tokens) - 1,
            nodes=[self.tokens[-1], *draft],
            granted=granted,
        )
        went_on = []
        for outcome in self.verifier.handle(asked):
            if outcome is None:
                continue  # others may have their turn
            assert isinstance(outcome, VerificationOutcome)
            assert outcome.round == asked.round + len(went_on)
            self.idle_ms = outcome.idle_ms
            self.tokens += [*draft[: outcome.accepted], outcome.bonus]
            went_on.append(outcome.goes_on)
            if len(went_on) == revoke_after:
                revoke = Revoke(sequence=self.number, round=asked.round)
                assert list(self.verifier.handle(revoke)) == []
        return went_on

    def count(self, *draft: int, granted: int = 0, revoke_after: int = 0) -> int:
        """As `verify`; returns the passes that the model ran."""
        before = self.model.count
        self.verify(*draft, granted=granted, revoke_after=revoke_after)
        return self.model.count - before


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_plain_decoding(family: str) -> None:
    """Twelve tokens for one message, with a pass each."""
    asking = Asking(family, Sampling())
    assert asking.verify(granted=11) == [True] * 11 + [False]
    assert plain(family, PROMPT, 12, Sampling()) == asking.tokens[3:]
    assert asking.model.count == 12


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_revoked_comes_to_an_end(family: str) -> None:
    """One more token, whose pass had begun; then drafts, right and wrong, are verified."""
    right = plain(family, PROMPT, 16, Sampling())
    asking = Asking(family, Sampling())
    limit = asking.verifier.max_draft_tokens
    while len(asking.tokens) < 12:
        assert asking.verify(granted=50, revoke_after=2) == [True, True, False]
        done = len(asking.tokens) - 3
        if limit:
            assert asking.verify(right[done], 7) == [False]
    assert right[: len(asking.tokens) - 3] == asking.tokens[3:]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_under_every_way_of_choosing(sampling: Sampling) -> None:
    """As on a GPU, where the choice is made on the device."""
    with patch("services.verifier.acceptance.kernels", lambda: KERNELS["cuda"]):
        asking = Asking("llama", sampling)
        assert asking.verify(granted=11) == [True] * 11 + [False]
    assert asking.model.count == 12
    assert plain("llama", PROMPT, 12, sampling) == asking.tokens[3:]


HOST = {
    "penalty": Sampling(logits_options=LogitsOptions(repetition_penalty=1.7, answer_from=3)),
    "logprobs": Sampling(logprobs=2),
    "on a CPU": Sampling(temperature=0.8, seed=5),
}


@pytest.mark.parametrize("sampling", HOST.values(), ids=HOST)
def test_tokens_that_the_host_chooses_come_unasked_too(sampling: Sampling) -> None:
    """One pass after the other: none can begin before its token is known."""
    free = Asking("llama", sampling)
    assert free.verify(granted=11) == [True] * 11 + [False]
    assert free.model.count == 12
    asked = Asking("llama", sampling)
    for _ in range(12):
        asked.verify()
    assert asked.tokens == free.tokens


def test_a_stop_token_is_the_last() -> None:
    right = plain("llama", PROMPT, 12, Sampling())
    asking = Asking("llama", Sampling())
    asked = Verify(
        sequence=1, round=1, position=2, nodes=[5], granted=11, stop_ids=[right[6], 10**6]
    )
    outcomes = [o for o in asking.verifier.handle(asked) if isinstance(o, VerificationOutcome)]
    first = right.index(right[6])
    assert [o.bonus for o in outcomes] == right[: first + 1]
    assert not outcomes[-1].goes_on


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_that_is_cut_short_leaves_the_state_of_its_last_token(family: str) -> None:
    """The sequence is closed, as after a stop string or a cancel; the next turn goes on."""
    right = plain(family, PROMPT, 12, Sampling())
    asking = Asking(family, Sampling())
    asked = Verify(sequence=1, round=1, position=2, nodes=[5], granted=50)
    run = asking.verifier.handle(asked)
    told = [next(run) for _ in range(4)]
    run.close()
    assert [o.bonus for o in told if isinstance(o, VerificationOutcome)] == right[:4]
    state = asking.verifier._sequences[1].state
    assert state.length == 6
    asking.verifier.retire_all()
    again = OpenSequence(sequence=2, tokens=[*PROMPT, *right[:4]], sampling=Sampling())
    list(asking.verifier.handle(again))
    asking.number, asking.tokens = 2, [*PROMPT, *right[:5]]
    asking.verify(granted=6)
    assert right == asking.tokens[3:]


def test_what_was_revoked_early_is_not_begun() -> None:
    """The message overtakes the work, which had to wait for the prompt."""
    asking = Asking("llama", Sampling())
    list(asking.verifier.handle(Revoke(sequence=1, round=3)))
    asking.open(1, Sampling())
    assert asking.verify(granted=50) == [False]
    assert asking.verify(granted=2) == [True, True, False]


def test_a_pass_that_nobody_asked_for_changes_nothing() -> None:
    """A run is cut by a crash of whoever asked; the sequence goes on with a draft."""
    right = plain("llama", PROMPT, 16, Sampling())
    asking = Asking("llama", Sampling())
    asked = Verify(sequence=1, round=1, position=2, nodes=[5], granted=50)
    run = asking.verifier.handle(asked)
    assert isinstance(next(run), VerificationOutcome)
    run.close()
    asking.tokens.append(right[0])
    assert asking.count(right[1], 7) == 1
    assert right[: len(asking.tokens) - 3] == asking.tokens[3:]


def test_more_may_be_granted_before_the_end() -> None:
    """Passes go on ahead as if all had been granted at once; for another run it means nothing."""
    right = plain("llama", PROMPT, 12, Sampling())
    asking = Asking("llama", Sampling())
    told = []
    run = asking.verifier.handle(Verify(sequence=1, round=3, position=2, nodes=[5], granted=2))
    for outcome in run:
        assert isinstance(outcome, VerificationOutcome)
        told.append((outcome.bonus, outcome.goes_on))
        for number, more in ((2, 9), (3, 4)):
            if len(told) == 2:
                grant = Extend(sequence=1, round=number, granted=more)
                assert list(asking.verifier.handle(grant)) == []
    assert told == [(token, True) for token in right[:6]] + [(right[6], False)]
    assert asking.model.count == 7


def test_what_is_granted_to_a_run_that_has_ended_is_nothing() -> None:
    asking = Asking("llama", Sampling())
    assert asking.verify(granted=1) == [True, False]
    for sequence in (1, 9):
        assert list(asking.verifier.handle(Extend(sequence=sequence, round=3, granted=5))) == []
    assert asking.verify() == [False]


def test_no_pass_is_run_where_it_is_not_granted() -> None:
    asking = Asking("llama", Sampling())
    assert [asking.count() for _ in range(3)] == [1, 1, 1]


def test_no_pass_is_run_beside_another_sequence() -> None:
    """They share passes, which is worth more."""
    asking = Asking("llama", Sampling())
    asking.open(2, Sampling())
    assert asking.count(granted=3) == 4
    assert asking.verifier._sequences[1].passes == deque()
    list(asking.verifier.handle(CloseSequence(sequence=2)))
    assert plain("llama", PROMPT, 4, Sampling()) == asking.tokens[3:]


def test_a_choice_that_is_not_a_token_is_discarded() -> None:
    asking = Asking("llama", Sampling())
    asking.verify()
    sequence = asking.verifier._sequences[1]
    length = sequence.state.length
    [ahead] = asking.verifier.scheduler.runner.run(follow(mx.array([-1]), [sequence.state]))
    assert not ahead.fill(read_tree([asking.tokens[-1]], []))
    assert not ahead.fill(read_tree([0, 1], []))
    assert length == sequence.state.length
    asking.verify()
    assert plain("llama", PROMPT, 2, Sampling()) == asking.tokens[3:]
