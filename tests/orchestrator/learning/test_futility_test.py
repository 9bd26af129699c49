"""A drafter that knows nothing is found out by what is accepted, without a clock."""

from random import Random

import pytest

from orchestrator.learning.futility_test import FutilityTest


def rounds_until_settled(doubt: FutilityTest, rate: float, seed: int = 0) -> int:
    """Rounds with one draft token each that is accepted at this rate; 500 at most."""
    random = Random(seed)  # noqa: S311  # no secret depends on it
    for number in range(500):
        if doubt.is_futile:
            return number
        doubt.observe(int(random.random() < rate), 1)
    return 500


def test_nothing_accepted_settles_it_within_some_rounds() -> None:
    """Fifteen rounds at first; fewer where the drafter is known for it."""
    assert rounds_until_settled(FutilityTest(), 0.0) == 15
    assert rounds_until_settled(FutilityTest().for_next_trial(), 0.0) == 8


@pytest.mark.parametrize("rate", [0.2, 0.4])
def test_a_useful_drafter_is_seldom_doubted(rate: float) -> None:
    """At the rate that the test is made for, at most one of 15 (Wald's bound)."""
    doubted = sum(rounds_until_settled(FutilityTest(), rate, seed) < 500 for seed in range(200))
    assert doubted <= 200 / 15


def test_a_pass_of_many_chains_counts_as_so_many() -> None:
    """Eight requests know in two passes what one knows in fifteen rounds."""
    doubt = FutilityTest()
    doubt.observe(0, 8)
    assert not doubt.is_futile
    doubt.observe(0, 8)
    assert doubt.is_futile


def test_who_was_ahead_is_given_the_benefit() -> None:
    """Evidence against the drafter goes, evidence for it stays."""
    doubt = FutilityTest()
    doubt.observe(0, 14)
    assert rounds_until_settled(doubt.after_gain(), 0.0) == 15
    doubt.observe(2, 1)
    assert rounds_until_settled(doubt.after_gain(), 0.0) > 15
