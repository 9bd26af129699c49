"""The fan-out: Theorem 12 as real numbers, and the best whole ones."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.fan_out import (
    AFTER_ALL,
    AFTER_REJECTION,
    MissCurve,
    acceptance_distribution,
    allocate,
    geometric,
    round_shares,
    uniform,
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
EXPONENTS = st.floats(0.1, 3.0)
RATES = st.lists(st.floats(0.0, 1.0), max_size=10)


@pytest.mark.parametrize(("alpha", "r", "budget", "num_draft_tokens", "expected"), VECTORS)
def test_geometric_gives_the_published_numbers(
    alpha: float, r: float, budget: int, num_draft_tokens: int, expected: str
) -> None:
    """The closed form reproduces the test vectors to the printed digits."""
    actual = geometric(alpha, r, budget, range(num_draft_tokens))
    assert expected == " ".join(f"{count:.2f}" for count in actual)


@given(ALPHAS, EXPONENTS, st.integers(1, 200), st.integers(0, 16))
def test_geometric_spends_the_budget(
    alpha: float, r: float, budget: int, num_draft_tokens: int
) -> None:
    """The closed form has K + 1 terms that fall by one ratio before the last, and sum to B."""
    counts = geometric(alpha, r, budget, range(num_draft_tokens))
    assert len(counts) == num_draft_tokens + 1
    assert sum(counts) == pytest.approx(budget)
    ratio = alpha ** (1 / (1 + r))
    assert all(b / a == pytest.approx(ratio) for a, b in pairwise(counts[:-1]))


@given(ALPHAS, EXPONENTS, st.integers(1, 9), st.integers(0, 8), st.floats(-1, 1))
def test_geometric_cannot_be_improved(
    alpha: float, r: float, num_draft_tokens: int, at: int, share: float
) -> None:
    """Moving a part of one term to its neighbour never lowers the expected misses."""

    def misses(counts: list[float]) -> float:
        chances = [alpha**k * (1 - alpha) for k in range(num_draft_tokens)] + [
            alpha**num_draft_tokens
        ]
        return sum(p * f**-r for p, f in zip(chances, counts, strict=True))

    best = geometric(alpha, r, 24, range(num_draft_tokens))
    moved = list(best)
    at %= num_draft_tokens
    shift = 0.5 * share * min(moved[at], moved[at + 1])
    moved[at] -= shift
    moved[at + 1] += shift
    assert misses(moved) >= misses(best) * (1 - 1e-9)


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
    counts = allocate(acceptance_distribution(rates), budget)
    assert len(counts) == len(rates) + 1
    assert sum(counts) == budget
    assert min(counts) >= 0


@given(ALPHAS, st.integers(0, 80), st.integers(0, 10))
def test_allocation_falls_before_the_last(alpha: float, budget: int, num_draft_tokens: int) -> None:
    """With one rate for all tokens, a later rejection never gets more than an earlier one."""
    counts = allocate(acceptance_distribution([alpha] * num_draft_tokens), budget)[:-1]
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
    assert hits(tuple(allocate(law, budget))) == pytest.approx(best, abs=1e-12)


@given(RATES, st.integers(0, 40))
def test_more_budget_never_narrows(rates: list[float], budget: int) -> None:
    """One more branch widens exactly one acceptance length by one."""
    law = acceptance_distribution(rates)
    before, after = allocate(law, budget), allocate(law, budget + 1)
    expected = [0] * len(rates) + [1]
    assert expected == sorted(b - a for a, b in zip(before, after, strict=True))


@given(st.integers(0, 100), st.integers(0, 16))
def test_uniform_spends_the_budget_evenly(budget: int, num_draft_tokens: int) -> None:
    """K + 1 numbers that differ by at most one, earlier ones first."""
    counts = uniform(budget, num_draft_tokens)
    assert len(counts) == num_draft_tokens + 1
    assert sum(counts) == budget
    assert max(counts) - min(counts) <= 1
    assert sorted(counts, reverse=True) == counts


@given(ALPHAS, EXPONENTS, st.integers(1, 200), st.integers(0, 16))
def test_rounding_keeps_the_budget(
    alpha: float, r: float, budget: int, num_draft_tokens: int
) -> None:
    """Whole numbers near the closed form's, with its sum."""
    exact = geometric(alpha, r, budget, range(num_draft_tokens))
    counts = round_shares(exact)
    assert sum(counts) == budget
    assert all(abs(a - b) < 1.0 for a, b in zip(counts, exact, strict=True))
