"""C of Saguaro sampling, chosen by the speed that it brings."""

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.saguaro import CHOICES, SaguaroChoice
from orchestrator.requests.admission import Admission
from orchestrator.sequence.actions import ToDrafter
from orchestrator.sequence.sequence import Sequence
from protocol.errors import UsageError
from protocol.messages import Generate, OpenSequence, Sampling, VerificationOutcome


def lived(speeds: dict[float, float], requests: int, seed: int = 0) -> Counter[float]:
    """Requests of 60 rounds; a round of 50 ms emits 1 or 2 tokens, `speeds` on average."""
    random, choice = Random(seed), SaguaroChoice()  # noqa: S311  # no secret depends on it
    chosen: Counter[float] = Counter()
    for _ in range(requests):
        weight = choice.choose()
        chosen[weight] += 1
        for _ in range(60):
            choice.observe(weight, 1 + (random.random() < speeds[weight] - 1), 50.0)
    return chosen


def test_every_choice_is_tried_once_first() -> None:
    """Beginning with none at all, which is C = 1."""
    choice = SaguaroChoice()
    tried = []
    for _ in CHOICES:
        tried.append(choice.choose())
        choice.observe(tried[-1], 1, 50.0)
    assert list(CHOICES) == tried


@pytest.mark.parametrize("best", CHOICES)
@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_is_found(best: float, seed: int) -> None:
    """A gain of a fifth is found, and then mostly used; the others are tried now and then."""
    speeds = {weight: 1.7 if weight == best else 1.4 for weight in CHOICES}
    chosen = lived(speeds, 200, seed)
    assert chosen[best] > 120
    assert min(chosen.values()) >= 1


def test_time_counts_as_much_as_tokens() -> None:
    """As many tokens in less time are the better choice: that is what hits bring."""
    choice = SaguaroChoice()
    for _ in range(300):
        for weight in CHOICES:
            choice.observe(weight, 2, 40.0 if weight == 0.4 else 50.0)
    assert choice.choose() == 0.4


def test_a_text_that_changes_is_followed() -> None:
    """What was slow is tried again, and wins if it has become fast."""
    choice = SaguaroChoice()
    for fast in (1.0, 0.2):
        chosen: Counter[float] = Counter()
        for _ in range(200):
            weight = choice.choose()
            chosen[weight] += 1
            for _ in range(60):
                choice.observe(weight, 1, 30.0 if weight == fast else 50.0)
        assert chosen[fast] > 120


@given(st.lists(st.tuples(st.sampled_from([*CHOICES, 0.7]), st.integers(1, 9), st.floats(0, 1e6))))
def test_any_rounds_are_survived(rounds: list[tuple[float, int, float]]) -> None:
    """It always names one of its choices; a C fixed by hand teaches it nothing."""
    choice = SaguaroChoice()
    for weight, tokens, milliseconds in rounds:
        choice.observe(weight, tokens, milliseconds)
        assert choice.choose() in CHOICES


class Letters:
    """What admission needs of a tokenizer."""

    stop_ids = frozenset({0})

    def stream(self, *, marks: bool) -> None:
        assert not marks


def admitted(estimates: CostModel, request: Generate) -> Sequence:
    tokenizer: Any = Letters()
    admission = Admission(tokenizer, 10, estimates)
    admission.check(request)
    return admission.admit(b"", request, request.tokens, context_length=0, now=0.0).sequence


def opened(sequence: Sequence) -> Sampling:
    """The sampling that the drafter is told."""
    [message] = [a.message for a in sequence.on_drafter_up(0) if isinstance(a, ToDrafter)]
    assert isinstance(message, OpenSequence)
    return message.sampling


REJECTION = Sampling(temperature=1.0, acceptance="rejection")


def test_requests_that_leave_it_open_try_the_choices() -> None:
    """Each next request gets the C that its predecessors' rounds recommend; others keep theirs."""
    estimates, told = CostModel(), []
    for _ in CHOICES:
        request = Generate(request=1, tokens=[1], sampling=REJECTION, choose_saguaro=True)
        sequence = admitted(estimates, request)
        told.append(opened(sequence).saguaro)
        for number in (1, 2):
            if number == 1:
                sequence.on_verifier_up(8)
            sequence.decide(outcome(number), float(number))
            sequence.record(float(number))
    assert list(CHOICES) == told
    fixed = msgspec.structs.replace(REJECTION, saguaro=0.3)
    assert opened(admitted(estimates, Generate(request=1, tokens=[1], sampling=fixed))) == fixed


def outcome(number: int) -> VerificationOutcome:
    return VerificationOutcome(
        sequence=1, round=number, accepted=0, bonus=5, verify_ms=40.0, idle_ms=1.0
    )


def test_greedy_requests_have_nothing_to_choose() -> None:
    """At temperature 0 nothing is drawn, and nothing is learned of C."""
    greedy = msgspec.structs.replace(REJECTION, temperature=0.0)
    request = Generate(request=1, tokens=[1], sampling=greedy, choose_saguaro=True)
    assert opened(admitted(CostModel(), request)) == greedy


def test_the_coupled_rule_has_no_such_weight() -> None:
    """Asking for a choice of C under the coupled rule is a UsageError."""
    request = Generate(request=1, tokens=[1], choose_saguaro=True)
    with pytest.raises(UsageError, match="rejection"):
        admitted(CostModel(), request)
