"""Whether speculation pays is decided by measurement, cheaply."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.pace import Pace


def run(pace: Pace, speculative: float, plain: float, rounds: int, seed: int = 0) -> float:
    """Rounds of noisy speeds (tokens per round of 50 ms); returns the share of plain rounds."""
    random = Random(seed)  # noqa: S311  # no secret depends on it
    count = 0
    for _ in range(rounds):
        count += not pace.speculating
        mean = speculative if pace.speculating else plain
        pace.observe(1 + (random.random() < mean - 1), 50.0)
    return count / rounds


@pytest.mark.parametrize("seed", range(5))
def test_a_gain_is_kept(seed: int) -> None:
    """Where speculation is faster, plain decoding is only measured."""
    assert run(Pace(), 1.6, 1.0, 1000, seed) < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_is_ended(seed: int) -> None:
    """Where it is slower, trials are rare."""
    pace = Pace()
    slow = Random(seed)  # noqa: S311  # no secret depends on it
    plain = 0
    for _ in range(2000):
        plain += not pace.speculating
        pace.observe(1, 60.0 + slow.random() if pace.speculating else 50.0 + slow.random())
    assert plain / 2000 > 0.9


def test_text_that_becomes_easy_is_noticed() -> None:
    """A trial after a pause can bring speculation back, whatever was before."""
    pace = Pace()
    for _ in range(400):
        pace.observe(1, 70.0 if pace.speculating else 50.0)
    share = 0
    for _ in range(2000):
        share += pace.speculating
        pace.observe(2 if pace.speculating else 1, 60.0 if pace.speculating else 50.0)
    assert share / 2000 > 0.6
    assert pace.speculating


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 1e6)), max_size=300))
def test_any_rounds_are_survived(rounds: list[tuple[int, float]]) -> None:
    """No sequence of measurements leads it astray, not even a clock that stands still."""
    pace = Pace()
    for tokens, milliseconds in rounds:
        pace.observe(tokens, milliseconds)
        assert pace.plain_tok_s >= 0.0
        assert pace.speculative_tok_s >= 0.0
