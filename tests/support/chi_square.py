"""Is a sample from a law? Pearson's test, with rare cells thrown together."""

from collections.abc import Hashable, Mapping
from math import sqrt
from typing import TypeVar

ONE_IN_A_THOUSAND = 3.090
ONE_IN_TEN_THOUSAND = 3.719
"""Standard normal quantiles."""

_LEAST = 5.0
"""Cells that are expected less often are thrown together."""

Cell = TypeVar("Cell", bound=Hashable)


def critical(freedom: int, quantile: float) -> float:
    """What chi-square exceeds with that probability (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * freedom)
    value: float = freedom * (1 - part + quantile * sqrt(part)) ** 3
    return value


def assert_law(
    counts: Mapping[Cell, int],
    law: Mapping[Cell, float],
    quantile: float = ONE_IN_TEN_THOUSAND,
) -> None:
    """The counts are those of draws from the law, as far as chi-square can tell."""
    assert set(counts) <= {cell for cell, share in law.items() if share > 0.0}
    draws = sum(counts.values())
    cells = [
        (counts.get(cell, 0), draws * share)
        for cell, share in law.items()
        if draws * share >= _LEAST
    ]
    rest = (draws - sum(count for count, _ in cells), draws - sum(share for _, share in cells))
    if rest[1] >= _LEAST:
        cells.append(rest)
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    assert statistic < critical(len(cells) - 1, quantile)
