"""Whether speculation pays is decided by measurement, cheaply."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.speculation_switch import SpeculationSwitch


def run(
    pace: SpeculationSwitch, speculative: float, plain: float, rounds: int, seed: int = 0
) -> float:
    """Rounds of noisy speeds (tokens per round of 50 ms); returns the share of plain rounds."""
    random = Random(seed)  # noqa: S311  # no secret depends on it
    count = 0
    for _ in range(rounds):
        count += not pace.speculating
        mean = speculative if pace.speculating else plain
        pace.observe(1 + (random.random() < mean - 1), 50.0, accepted=1)
    return count / rounds


@pytest.mark.parametrize("seed", range(5))
def test_a_gain_is_kept(seed: int) -> None:
    """Where speculation is faster, plain decoding is only measured."""
    assert run(SpeculationSwitch(), 1.6, 1.0, 1000, seed) < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_is_ended(seed: int) -> None:
    """Where it is slower, trials are rare."""
    pace = SpeculationSwitch()
    slow = Random(seed)  # noqa: S311  # no secret depends on it
    plain = 0
    for _ in range(2000):
        plain += not pace.speculating
        pace.observe(
            1, 60.0 + slow.random() if pace.speculating else 50.0 + slow.random(), accepted=1
        )
    assert plain / 2000 > 0.9


def test_text_that_becomes_easy_is_noticed() -> None:
    """A trial after a pause can bring speculation back, whatever was before."""
    pace = SpeculationSwitch()
    for _ in range(400):
        pace.observe(1, 70.0 if pace.speculating else 50.0, accepted=1)
    share = 0
    for _ in range(2000):
        share += pace.speculating
        pace.observe(2 if pace.speculating else 1, 60.0 if pace.speculating else 50.0, accepted=1)
    assert share / 2000 > 0.6
    assert pace.speculating


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 1e6)), max_size=300))
def test_any_rounds_are_survived(rounds: list[tuple[int, float]]) -> None:
    """No sequence of measurements leads it astray, not even a clock that stands still."""
    pace = SpeculationSwitch()
    for tokens, milliseconds in rounds:
        pace.observe(tokens, milliseconds, accepted=tokens)
        assert pace.plain_tok_s >= 0.0
        assert pace.speculative_tok_s >= 0.0


def settled(speculative_ms: float, plain_ms: float, rounds: int = 60) -> SpeculationSwitch:
    """After some rounds of one token each in these times."""
    pace = SpeculationSwitch()
    for _ in range(rounds):
        pace.observe(1, speculative_ms if pace.speculating else plain_ms, accepted=1)
    return pace


def test_a_loss_ends_after_few_tokens() -> None:
    """What speculation loses before a pause is bounded: some tokens at first, then fewer."""
    pace = settled(45.0, 50.0)
    losses = []
    for _ in range(4):
        was_speculating = pace.speculating
        lost = 0.0
        while pace.speculating is was_speculating:
            lost += 0.2 if pace.speculating else 0.0
            pace.observe(1, 60.0 if pace.speculating else 50.0, accepted=1)
        if was_speculating:
            losses.append(lost)
    assert max(losses) < 12.0
    assert sum(losses) / len(losses) < 9.0


def test_pauses_grow_and_trials_shrink() -> None:
    """Where speculation never pays, each pause is longer than the one before, up to a limit."""
    pace = settled(60.0, 50.0, rounds=40)
    stretches: list[tuple[bool, int]] = []
    length = 0
    for _ in range(6000):
        before = pace.speculating
        pace.observe(1, 60.0 if pace.speculating else 50.0, accepted=1)
        length += 1
        if pace.speculating is not before:
            stretches.append((before, length))
            length = 0
    pauses = [count for trying, count in stretches if not trying and count > 20]
    trials = [count for trying, count in stretches if trying]
    assert pauses == sorted(pauses)
    assert pauses[0] < 52
    assert 500 < pauses[-1] < 600
    assert trials[-1] <= trials[0] < 40


def test_a_new_text_is_tried_early() -> None:
    """A pause on one text says little of the next; where all fail, trials become rarer."""
    waits = []
    pace = settled(60.0, 50.0, rounds=60)
    for _ in range(8):
        while pace.speculating:
            pace.observe(1, 60.0, accepted=1)
        pace.on_new_text()
        waits.append(0)
        while not pace.speculating:
            pace.observe(1, 50.0, accepted=1)
            waits[-1] += 1
    assert waits == sorted(waits)
    assert waits[0] <= 13
    assert 60 <= waits[-1] <= 70


def test_a_slower_machine_is_no_loss() -> None:
    """If both ways become slower, plain decoding is measured again before speculation ends."""
    pace = settled(40.0, 50.0, rounds=100)
    assert pace.speculating
    plain, longest, length = 0, 0, 0
    for _ in range(400):
        length = 0 if pace.speculating else length + 1
        longest = max(longest, length)
        plain += not pace.speculating
        pace.observe(1, 80.0 if pace.speculating else 100.0, accepted=1)
    assert plain > 0
    assert longest < 10
    assert pace.plain_tok_s == pytest.approx(10.0, rel=0.3)


def test_one_bad_stretch_does_not_end_a_gain() -> None:
    """Text on which speculation gains half may lose for ten rounds without a pause."""
    pace = settled(33.0, 50.0, rounds=100)
    for _ in range(10):
        pace.observe(1, 60.0, accepted=1)
    for _ in range(10):
        assert pace.speculating
        pace.observe(1, 33.0, accepted=1)


def test_the_first_baseline_is_measured_early() -> None:
    """After a first trial plain decoding is measured for a few rounds."""
    pace = SpeculationSwitch()
    kinds = []
    for _ in range(60):
        kinds.append(pace.speculating)
        pace.observe(1, 30.0 if pace.speculating else 50.0, accepted=1)
    assert kinds[0]
    assert 3 <= kinds.count(False) <= 8
    assert False not in kinds[:20]
    assert pace.plain_tok_s == pytest.approx(20.0)
    assert pace.speculative_tok_s == pytest.approx(1e3 / 30.0)


@pytest.mark.parametrize("every", [2, 5])
def test_a_drafter_that_knows_a_little_is_not_doubted(every: int) -> None:
    """One token in a few rounds is a gain where rounds cost the same; only the clock may judge."""
    pace = SpeculationSwitch()
    plain = 0
    for number in range(600):
        plain += not pace.speculating
        accepted = int(pace.speculating and number % every == 0)
        pace.observe(1 + accepted, 52.0 if pace.speculating else 50.0, accepted)
    assert plain < 30


def test_poor_drafts_are_compared_with_plain_decoding_at_once() -> None:
    """Nothing accepted: plain decoding is tried after a few rounds, and kept if it is faster."""
    pace = SpeculationSwitch()
    lost = 0
    for _ in range(40):
        lost += pace.speculating
        pace.observe(1, 65.0 if pace.speculating else 50.0, accepted=0)
    assert pace.is_paused
    assert lost <= 6


def test_good_drafts_are_not_interrupted_early() -> None:
    """Where much is accepted, a baseline would only cost."""
    pace = SpeculationSwitch()
    for _ in range(20):
        assert pace.speculating
        pace.observe(3, 65.0, accepted=2)


def test_what_was_gained_may_be_lost_again() -> None:
    """Bad luck at the very beginning ends a trial; the same after a gain does not."""
    lucky = settled(33.0, 50.0, rounds=60)
    fresh = SpeculationSwitch()
    for pace in (lucky, fresh):
        for _ in range(8):
            pace.observe(1, 65.0 if pace.speculating else 50.0, accepted=1)
    assert lucky.speculating
    assert lucky.allowance > fresh.allowance
