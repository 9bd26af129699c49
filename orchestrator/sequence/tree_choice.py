"""Selects the part of a draft that is worth verifying: greedy by probability. Pure.

A token counts if all tokens before it are accepted, so its value is the probability of its whole
path, and no path is likelier than its prefix. Hence the m most likely nodes are a tree, the best
one of m nodes.
"""

from collections.abc import Sequence

from protocol.decoding.token_tree import CHAIN_ROWS


def rank_nodes(parents: Sequence[int], rates: Sequence[float]) -> tuple[list[int], list[float]]:
    """Sort the nodes of a draft by the probability of their paths; parents precede children.

    Args:
        parents: the row of each draft token's parent, an earlier one; row 0 is the pending token.
        rates: the probability that each is accepted, given that its parent is.

    Returns:
        Their rows, and the probability that all tokens up to each are accepted.
    """
    chances = [1.0]
    for parent, rate in zip(parents, rates, strict=True):
        chances.append(chances[parent] * rate)
    # A stable sort keeps parents before equally likely children.
    rows = sorted(range(1, len(chances)), key=chances.__getitem__, reverse=True)
    return rows, [chances[row] for row in rows]


def count_chain(rows: Sequence[int], parents: Sequence[int]) -> int:
    """Return how many of these rows, from the first on, form a chain."""
    last = 0
    for count, row in enumerate(rows):
        if parents[row - 1] != last:
            return count
        last = row
    return len(rows)


def find_best(values: Sequence[float]) -> int:
    """Return how many nodes to verify: the index of the largest value, the first of equals.

    Passes have few sizes (`token_tree`).

    Args:
        values: values of the first 0, 1, ... nodes.
    """
    counts = [rows - 1 for rows in CHAIN_ROWS if rows <= len(values)]
    best: int = max(counts, key=lambda count: values[count])
    return best
