"""The fan-out: Theorem 12 in whole numbers."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.fan_out import (
    AFTER_ALL,
    AFTER_REJECTION,
    MissCurve,
    acceptance_distribution,
    allocate,
    choose_curves,
)

# From Theorem 12, worked out by hand.
VECTORS = [
    (0.80, 1.0, 24, 7, "3.90 3.49 3.12 2.79 2.49 2.23 2.00 3.99"),
    (0.87, 1.0, 24, 7, "3.23 3.01 2.81 2.62 2.44 2.28 2.12 5.50"),
    (0.60, 1.0, 24, 7, "6.06 4.70 3.64 2.82 2.18 1.69 1.31 1.60"),
    (0.64, 1.0, 20, 4, "5.50 4.40 3.52 2.82 3.76"),
    (0.80, 2.0, 24, 7, "3.59 3.34 3.10 2.88 2.67 2.48 2.30 3.65"),
]
ALPHAS = st.floats(0.05, 0.95)
RATES = st.lists(st.floats(0.0, 1.0), max_size=10)


def share_out(chances: list[float], budget: int) -> list[int]:
    """Over a chain, by the assumed curves."""
    parents = range(len(chances) - 1)
    return allocate(chances, budget, choose_curves(parents, AFTER_REJECTION, AFTER_ALL))


def test_equal_curves_give_theorem_12() -> None:
    """Where tokens are alike and misses follow one power law, counts are those in round numbers."""
    for alpha, r, budget, num_draft_tokens, published in VECTORS:
        law, curve = acceptance_distribution([alpha] * num_draft_tokens), MissCurve(0.7, r)
        counts = allocate(law, budget, [curve] * len(law))
        expected = [float(number) for number in published.split()]
        assert all(abs(a - b) < 1.5 for a, b in zip(counts, expected, strict=True))


@given(RATES)
def test_acceptance_lengths_have_a_law(rates: list[float]) -> None:
    """P(0..K) is a law: K + 1 chances, none negative, that sum to one."""
    law = acceptance_distribution(rates)
    assert len(law) == len(rates) + 1
    assert min(law) >= 0.0
    assert sum(law) == pytest.approx(1.0)


@given(ALPHAS, st.integers(0, 10))
def test_equal_rates_give_the_geometric_law(alpha: float, num_draft_tokens: int) -> None:
    """With one rate for all tokens, P(k) = alpha^k (1 - alpha) and P(K) = alpha^K."""
    expected = [alpha**k * (1 - alpha) for k in range(num_draft_tokens)] + [alpha**num_draft_tokens]
    assert expected == pytest.approx(acceptance_distribution([alpha] * num_draft_tokens))


def test_the_acceptance_law_is_that_of_a_chain() -> None:
    """A token counts only if all before it were accepted."""
    assert pytest.approx(acceptance_distribution([0.5, 0.2, 1.0])) == [0.5, 0.4, 0.0, 0.1]
    assert acceptance_distribution([]) == [1.0]


MEASURED = [
    (AFTER_REJECTION, ".27 .41 .49 .53 .64 .75"),
    (AFTER_ALL, ".60 .71 .76 .80 .85 .89"),
]


@pytest.mark.parametrize(("law", "measured"), MEASURED, ids=["after rejection", "after all"])
def test_miss_laws_are_those_that_were_measured(law: MissCurve, measured: str) -> None:
    """The two miss laws lie within .05 of what was measured of an early default pair."""
    expected = [float(number) for number in measured.split()]
    assert expected == pytest.approx([law.hit(count) for count in (1, 2, 3, 4, 8, 16)], abs=0.05)


@pytest.mark.parametrize("law", [AFTER_REJECTION, AFTER_ALL], ids=["after rejection", "after all"])
def test_miss_laws_are_concave(law: MissCurve) -> None:
    """No candidate gains more than the one before it, which is why greedy allocation is best."""
    gains = [law.hit(count + 1) - law.hit(count) for count in range(300)]
    assert law.hit(0) == 0.0
    assert min(gains) > 0.0
    assert sorted(gains, reverse=True) == gains


@given(RATES, st.integers(0, 80))
def test_allocation_spends_the_budget(rates: list[float], budget: int) -> None:
    """Whole numbers: K + 1 of them, none negative, that sum to B."""
    counts = share_out(acceptance_distribution(rates), budget)
    assert len(counts) == len(rates) + 1
    assert sum(counts) == budget
    assert min(counts) >= 0


@given(ALPHAS, st.integers(0, 80), st.integers(0, 10))
def test_allocation_falls_before_the_last(alpha: float, budget: int, num_draft_tokens: int) -> None:
    """With one rate for all tokens, a later rejection never gets more than an earlier one."""
    counts = share_out(acceptance_distribution([alpha] * num_draft_tokens), budget)[:-1]
    assert sorted(counts, reverse=True) == counts


@pytest.mark.parametrize("rates", [[], [0.6], [0.9, 0.2], [0.5, 0.5], [0.95] * 3, [0.3, 0.8, 0.6]])
@pytest.mark.parametrize("budget", [1, 4, 7])
def test_allocation_is_the_best(rates: list[float], budget: int) -> None:
    """No other way to spend a small budget hits more often under the miss laws."""
    law = acceptance_distribution(rates)
    laws = [AFTER_REJECTION] * len(rates) + [AFTER_ALL]

    def hits(counts: tuple[int, ...]) -> float:
        return sum(p * m.hit(f) for p, m, f in zip(law, laws, counts, strict=True))

    every = product(range(budget + 1), repeat=len(law))
    best = max(hits(counts) for counts in every if sum(counts) == budget)
    assert hits(tuple(share_out(law, budget))) == pytest.approx(best, abs=1e-12)


@given(RATES, st.integers(0, 40))
def test_more_budget_never_narrows(rates: list[float], budget: int) -> None:
    """One more branch widens exactly one acceptance length by one."""
    law = acceptance_distribution(rates)
    before, after = share_out(law, budget), share_out(law, budget + 1)
    expected = [0] * len(rates) + [1]
    assert expected == sorted(b - a for a, b in zip(before, after, strict=True))
