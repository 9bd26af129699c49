"""Which part of a draft tree is worth verifying: greedy by probability. Pure.

A token counts if all tokens before it are accepted, so it brings the probability of its whole
path, and no path is likelier than its beginning. Hence the m likeliest nodes are a tree, the
best one of m nodes; what is left to choose is m, by what a pass of m + 1 rows costs. Where rows
are dear few nodes are left, mostly a chain.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from protocol.decoding.token_tree import CHAIN_ROWS, TREE_ROWS


class RankedNodes(NamedTuple):
    """Draft tokens, the likeliest path first; every parent comes before its children."""

    rows: list[int]
    """Rows of the draft; the pending token's, 0, is none of them."""
    chances: list[float]
    """The probability that all tokens up to each are accepted."""


def rank_nodes(parents: Sequence[int], rates: Sequence[float]) -> RankedNodes:
    """Sort the nodes of a draft by the probability of their paths.

    Args:
        parents: the row of each draft token's parent, an earlier one; row 0 is the pending token.
        rates: the probability that each is accepted, given that its parent is.
    """
    chances = [1.0]
    for parent, rate in zip(parents, rates, strict=True):
        chances.append(chances[parent] * rate)
    # A stable sort keeps parents before children that are as likely.
    rows = sorted(range(1, len(chances)), key=chances.__getitem__, reverse=True)
    return RankedNodes(rows, [chances[row] for row in rows])


def count_chain(rows: Sequence[int], parents: Sequence[int]) -> int:
    """How many of the first of these rows follow one another: that many are a chain."""
    last = 0
    for count, row in enumerate(rows):
        if parents[row - 1] != last:
            return count
        last = row
    return len(rows)


def find_best(values: Sequence[float], chain: int | None = None) -> int:
    """How many nodes to verify: where the largest value stands; the first of equals.

    Passes have few sizes (`token_tree`).

    Args:
        values: of the first 0, 1, ... nodes.
        chain: how many of them are a chain; None: all.
    """
    last = len(values) - 1
    chain = last if chain is None else min(chain, last)
    chains = [rows - 1 for rows in CHAIN_ROWS if rows - 1 <= chain]
    trees = [rows - 1 for rows in TREE_ROWS if chain < rows - 1 <= last]
    best: int = max([*chains, *trees], key=lambda count: values[count])
    return best


def count_siblings(rate: float, hits: Sequence[float], row_cost: float) -> int:
    """How many runners-up could be worth a row of their own, beside a draft's first token.

    Deeper ones have less of a chance, so where none pays here none pays at all.

    Args:
        rate: at which first choices are accepted.
        hits: h(0), h(1), ...: the chance that the target's token is among the first F runners-up
            if the first choice fell.
        row_cost: what a row could have brought otherwise, in tokens.
    """
    gains = [(1.0 - rate) * (more - less) for less, more in pairwise(hits)]
    return next((index for index, gain in enumerate(gains) if gain <= row_cost), len(gains))
