"""Theorem 7: the tokens per second of rounds whose every wait brings something.

The rounds' own tokens and times are those of the chains and trees that were verified. What better
trees would have brought is a bound of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate


@dataclass
class Rounds:
    """Rounds of one kind, added up."""

    count: int = 0
    tokens: int = 0
    verify_ms: float = 0.0

    def add(self, tokens: int, verify_ms: float) -> None:
        """One more, which brought `tokens` tokens."""
        self.count += 1
        self.tokens += tokens
        self.verify_ms += verify_ms

    @property
    def tokens_per_round(self) -> float:
        """E, bonus token included; 0 if there were no rounds."""
        return self.tokens / self.count if self.count else 0.0


def upper_bound_tok_s(hit: Rounds, miss: Rounds, backup_ms: float) -> float:
    """[p E_hit + (1-p) E_miss] / [p T_v + (1-p) (T_v + T_b)], in tokens per second.

    Each T_v is that of the lengths that were verified in such rounds; with sums in place of
    means p cancels. What is left out, and so is lost: messages, and waiting for a tree.

    Args:
        hit: rounds whose draft was ready in time.
        miss: all others.
        backup_ms: total time in which drafts were made while the target waited.
    """
    milliseconds = hit.verify_ms + miss.verify_ms + backup_ms
    return 1e3 * (hit.tokens + miss.tokens) / milliseconds if milliseconds else 0.0


def tree_bound_tok_s(
    hit: Rounds,
    miss: Rounds,
    backup_ms: float,
    *,
    ranks: Sequence[float],
    verify_ms: Sequence[float],
) -> float:
    """The same if each round whose draft was ready had verified the best tree of the best size.

    Assumed: a tree of any depth, all of it ready at once, and places in the text that are alike.
    What is lost against it besides waiting: trees that were shallower, smaller, or otherwise
    chosen. Where confidences tell easy places from hard ones, trees that follow them may bring
    more than the best one for alike places; what was verified counts as it is, so that the bound
    is at least Theorem 7's. With no other rounds it is the bound if every outcome was prepared.

    Args:
        hit: as in `upper_bound_tok_s`, as the next two.
        miss: all other rounds.
        backup_ms: total wait for drafts.
        ranks: how likely the target's token is the drafter's first, second, ... choice
            (`estimate_ranks`); none: it drafted nothing that was ready.
        verify_ms: T_v(1), T_v(2), ... of trees; the best tree is no larger.
    """
    own = upper_bound_tok_s(hit, miss, backup_ms)
    if not hit.count:
        return own
    sizes = zip(accumulate(_likeliest_paths(ranks), initial=1.0), verify_ms, strict=False)
    return max(
        own,
        *(
            1e3 * (hit.count * tokens + miss.tokens) / (hit.count * ms + miss.verify_ms + backup_ms)
            for tokens, ms in sizes
        ),
    )


def estimate_ranks(offered: Sequence[int], chosen: Sequence[int]) -> list[float]:
    """How likely the target's token is the drafter's first, second, ... choice.

    A choice that was not known at a place says nothing of it, so each rank's share is that of
    the places where the ranks before it had failed and it was known (as in `HitCurve`).

    Args:
        offered: `Statistics.offered_by_rank`.
        chosen: `Statistics.chosen_by_rank`.
    """
    missed, shares = 1.0, list[float]()
    for count, right in zip(offered, chosen, strict=True):
        shares.append(missed * right / count if count else 0.0)
        missed -= shares[-1]
    return shares


def _likeliest_paths(ranks: Sequence[float]) -> Iterator[float]:
    """The chances of the nodes of an endless tree, falling: no node is likelier than its parent."""
    waiting = [-chance for chance in ranks]
    heapify(waiting)
    while waiting:
        best = -heappop(waiting)
        yield best
        for chance in ranks:
            heappush(waiting, -best * chance)
