"""How often F candidates hold the bonus token, learned from rounds that saw only some of them."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.fan_out import AFTER_ALL, AFTER_REJECTION, MissCurve
from orchestrator.learning.hit_curve import HitCurve


@pytest.mark.parametrize("prior", [AFTER_REJECTION, AFTER_ALL])
@pytest.mark.parametrize("candidates", [0, 1, 2, 8, 32, 60])
def test_untaught_it_is_its_prior(prior: MissCurve, candidates: int) -> None:
    """Before any sample the curve is the assumed law, also far out."""
    assert HitCurve(prior).hit(candidates) == pytest.approx(prior.hit(candidates))


def test_it_learns_a_law_from_censored_samples() -> None:
    """Ranks drawn from 1/2, 1/4, 1/8 ...: each round shows only as many as it prepared."""
    curve = HitCurve(AFTER_REJECTION)
    random = Random(1)  # noqa: S311  # no secret depends on it
    for _ in range(4000):
        rank = 0
        while random.random() < 0.5:
            rank += 1
        prepared = random.randint(0, 6)
        curve.observe(rank if rank < prepared else None, prepared)
    for count in range(1, 6):
        assert curve.hit(count) == pytest.approx(1 - 0.5**count, abs=0.06)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=200), st.integers(0, 50)
)
def test_it_stays_a_probability(samples: list[tuple[int, int]], candidates: int) -> None:
    """It grows with the candidates, from 0 to at most 1."""
    curve = HitCurve(AFTER_ALL)
    for rank, prepared in samples:
        curve.observe(rank if rank < prepared else None, prepared)
    assert curve.hit(0) == 0.0
    assert 0.0 <= curve.hit(candidates) <= curve.hit(candidates + 1) <= 1.0


def test_asking_changes_nothing() -> None:
    """A curve that is asked all the time tells the same as one that is asked for the first time."""
    queried, random = HitCurve(AFTER_ALL), Random(2)  # noqa: S311  # no secret depends on it
    silent = HitCurve(AFTER_ALL)
    for _ in range(20):
        rank = random.choice([0, 1, 5, None])
        for curve in (queried, silent):
            curve.observe(rank, 8)
        queried.hit(random.randint(0, 40))
    queried.observe(3, 8)
    silent.observe(3, 8)
    hits = [queried.hit(count) for count in range(40)]
    assert [silent.hit(count) for count in range(40)] == hits
