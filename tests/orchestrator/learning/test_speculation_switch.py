"""Whether speculation pays is decided by measurement, on a credit that bounds what it costs."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.speculation_switch import SpeculationSwitch

LEAST_LOSS_MS = 5.0
"""Extra time of the cheapest speculative round."""


def begin(*, may_gain: bool = True) -> SpeculationSwitch:
    """At the start of a first text."""
    pace = SpeculationSwitch()
    pace.on_new_text(may_gain=may_gain)
    return pace


def add(pace: SpeculationSwitch, ms: float, plain_ms: float = 50.0, tokens: int = 1) -> float:
    """A round of either kind: returns the tokens that it lost, or gained if they are negative."""
    speculating = pace.speculating
    tokens, taken_ms = (tokens, ms) if speculating else (1, plain_ms)
    pace.observe(tokens, taken_ms, max(LEAST_LOSS_MS, ms - plain_ms), speculating=speculating)
    return taken_ms / plain_ms - tokens


def run(pace: SpeculationSwitch, rounds: int, ms: float, tokens: int = 1) -> float:
    """Rounds of these; returns the share of plain ones."""
    plain = 0
    for _ in range(rounds):
        plain += not pace.speculating
        add(pace, ms, tokens=tokens)
    return plain / rounds


def test_plain_decoding_is_measured_first() -> None:
    """Three rounds, so that a loss is noticed from the first speculative round on."""
    pace = begin()
    kinds = []
    for _ in range(60):
        kinds.append(pace.speculating)
        add(pace, 30.0)
    assert kinds == [False] * 3 + [True] * 57
    assert pace.plain_tok_s == pytest.approx(20.0)
    assert pace.speculative_tok_s == pytest.approx(1e3 / 30.0)


def test_a_slow_start_is_not_the_speed_of_plain_decoding() -> None:
    """Rounds that gain on it, but not on plain decoding at the present pace, are given up."""
    pace = begin()
    for _ in range(3):
        add(pace, 90.0, plain_ms=90.0)
    while pace.speculating and pace._left > -20:
        pace.observe(1, 60.0, LEAST_LOSS_MS, speculating=True, plain_ms=50.0)
    assert pace._left > -20
    assert pace.plain_tok_s == pytest.approx(20.0)


def test_a_machine_that_slows_down_slows_plain_decoding_too() -> None:
    """Rounds that would have lost before go on if plain decoding were slower still."""
    pace = begin()
    run(pace, 3, 50.0)
    for _ in range(30):
        assert pace.speculating
        pace.observe(1, 60.0, LEAST_LOSS_MS, speculating=True, plain_ms=75.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_gain_is_kept(seed: int) -> None:
    """Where speculation is faster, plain decoding is only measured."""
    random, pace, plain = Random(seed), begin(), 0  # noqa: S311  # no secret depends on it
    for _ in range(1000):
        plain += not pace.speculating
        add(pace, 55.0, tokens=1 + (random.random() < 0.6))
    assert plain / 1000 < 0.02


@pytest.mark.parametrize("ms", [56.0, 65.0, 75.0, 95.0])
def test_an_answer_loses_two_percent_at_most(ms: float) -> None:
    """Texts of 64 tokens on which nothing is ever accepted; the first one may try a few rounds."""
    pace, lost = SpeculationSwitch(), []
    for _ in range(6):
        pace.on_new_text(may_gain=True)
        lost.append(sum(add(pace, ms) for _ in range(64)))
    assert lost[0] <= max(0.02 * 64, 4 * (ms - 50.0) / 50.0)
    assert max(lost[1:]) <= 0.02 * 64


def test_dear_rounds_are_tried_all_the_same() -> None:
    """Passes that go on by themselves may take half as long as any verification."""
    pace = begin()
    assert run(pace, 60, 110.0, tokens=3) < 0.1


def test_a_pair_that_never_gained_loses_less_on_later_texts() -> None:
    """It has half of the credit."""
    pace, lost = SpeculationSwitch(), []
    for _ in range(3):
        pace.on_new_text(may_gain=True)
        lost.append(sum(add(pace, 60.0) for _ in range(40)))
    assert lost[1] < 0.7 * lost[0]
    assert lost[2] < 0.7 * lost[0]


@pytest.mark.parametrize(("gain", "lost_rounds"), [(1.0, 2), (2.0, 6), (3.0, 12)])
def test_a_pair_that_gains_survives_a_bad_start(gain: float, lost_rounds: int) -> None:
    """Of the next text; in proportion to the expected gain, and within what gains add up to."""
    pace = begin()
    run(pace, 40, 33.0)
    pace.on_new_text(may_gain=True, gain=gain)
    rounds = 0
    while pace.speculating:
        add(pace, 75.0)
        rounds += 1
    assert rounds == lost_rounds


def test_no_expectation_outweighs_losses() -> None:
    pace = begin()
    run(pace, 64, 75.0)
    pace.on_new_text(may_gain=True, gain=3.0)
    assert pace.credit == pytest.approx(0.5)


def losing() -> SpeculationSwitch:
    """The switch of a pair that has lost on many texts."""
    pace = SpeculationSwitch()
    for _ in range(20):
        pace.on_new_text(may_gain=True)
        run(pace, 64, 90.0)
    return pace


def test_a_pair_that_clearly_lost_is_not_tried_on_every_short_text() -> None:
    """It is tried once in two hundred tokens, across texts; each trial loses 0.8 tokens."""
    pace, lost, trials = losing(), 0.0, 0
    for _ in range(50):
        pace.on_new_text(may_gain=True)
        for _ in range(20):
            trials += pace.speculating
            lost += add(pace, 90.0)
    assert 4 <= trials <= 6
    assert lost < 0.005 * 50 * 20


def test_one_text_alone_does_not_decide_that_a_pair_has_lost() -> None:
    """Whatever it lost, the next text is a trial."""
    pace = begin()
    run(pace, 40, 33.0)
    pace.on_new_text(may_gain=True)
    run(pace, 4000, 90.0)
    pace.on_new_text(may_gain=True)
    pace.credit = 0.0
    pace.on_new_text(may_gain=True)
    assert pace.speculating


def test_a_pair_that_clearly_lost_recovers_once_it_gains() -> None:
    """Even on short texts: after the first trial nearly all rounds are speculative."""
    pace, speculative = losing(), 0
    for _ in range(40):
        pace.on_new_text(may_gain=True)
        for _ in range(20):
            speculative += pace.speculating
            add(pace, 50.0, tokens=3)
    assert speculative > 0.7 * 40 * 20


def test_a_pair_that_cannot_gain_is_hardly_tried() -> None:
    """By the times of passes and drafts; should they be wrong, a trial is earned."""
    pace = begin(may_gain=False)
    assert run(pace, 99, 60.0) == 1.0
    assert run(pace, 99, 60.0) < 1.0


def test_trials_are_rare_where_they_fail() -> None:
    """A two hundredth of the tokens is what they may lose."""
    pace = begin()
    lost = sum(add(pace, 70.0) for _ in range(2000))
    assert lost < 0.006 * 2000


def test_a_round_that_loses_more_than_the_credit_is_forgiven() -> None:
    """One unlucky pass of many rows: the next trial is a hundred tokens away, not four hundred."""
    pace = begin()
    run(pace, 3, 50.0)
    add(pace, 150.0)
    assert run(pace, 99, 65.0) == 1.0
    assert run(pace, 3, 65.0) < 1.0


def test_no_text_starts_with_more_than_can_be_gained() -> None:
    """Where a round costs four tokens; the first speculative one would cut the rest anyway."""
    pace = begin()
    for _ in range(3):
        pace.observe(1, 50.0, 200.0, speculating=False)
    assert pace.credit == 6.0


def test_text_that_becomes_easy_is_noticed() -> None:
    """A trial after a pause can bring speculation back, whatever was before."""
    pace = begin()
    run(pace, 400, 70.0)
    assert run(pace, 400, 60.0, tokens=2) < 0.3
    assert pace.speculating


def test_a_gain_survives_a_bad_stretch() -> None:
    """What was gained may be lost again; a text that gained nothing yet stops at once."""
    lucky, fresh = begin(), begin()
    run(lucky, 40, 33.0)
    for pace in (lucky, fresh):
        run(pace, 12, 65.0)
    assert lucky.speculating
    assert not fresh.speculating


def test_what_one_text_gained_is_not_lost_on_the_next() -> None:
    """A new text starts with the same credit as the first."""
    pace = begin()
    run(pace, 60, 33.0)
    pace.on_new_text(may_gain=True)
    assert sum(add(pace, 65.0) for _ in range(20)) < 1.3


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 1e6), st.booleans()), max_size=300))
def test_any_rounds_are_survived(rounds: list[tuple[int, float, bool]]) -> None:
    """No sequence of measurements leads it astray, not even a clock that stands still."""
    pace = begin()
    for tokens, milliseconds, speculating in rounds:
        pace.observe(tokens, milliseconds, LEAST_LOSS_MS, speculating=speculating)
        assert pace.plain_tok_s >= 0.0
        assert pace.speculative_tok_s >= 0.0


def test_a_slower_machine_is_no_loss() -> None:
    """If both ways become slower, plain decoding is measured again, and speculation goes on."""
    pace = begin()
    run(pace, 100, 40.0)
    plain = 0
    for _ in range(600):
        plain += not pace.speculating
        add(pace, 80.0, plain_ms=100.0)
    assert pace.speculating
    assert plain < 120
    assert pace.plain_tok_s == pytest.approx(10.0, rel=0.3)


def test_plain_decoding_is_measured_again_while_it_gains() -> None:
    """It may have become faster meanwhile."""
    pace = begin()
    kinds = []
    for _ in range(1100):
        kinds.append(pace.speculating)
        add(pace, 40.0)
    again = kinds.index(False, 3)
    assert 500 < again < 530
    assert kinds[again : again + 6] == [False] * 3 + [True] * 3
