"""What trees of drafts are worth: whether runners-up are asked for, which grow on, what that costs.

A drafter names runners-up beside each draft token. They are leaves, unless it is asked to continue
some of them too: then a runner-up that stands goes on with tokens, and every depth takes longer.
The value of each number is computed from what was measured: how often the target's token is
the first, second, ... choice, how likely each prepared outcome is, T_v(m) and T_d(B). Places in
a text are taken as alike; which nodes of a real tree are verified follows its own confidences.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import log, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.learning.averages import DiscountedRatio, smooth
from orchestrator.learning.round_observation import RoundObservation

GROWN = (0, 4, 8, 16)
"""A few fixed values, as the widths are."""

_EVERY = 8
"""Rounds between two computations."""
_BETTER = 1.01
"""A number is left for one that promises at least this much more."""
_FADE, _ENOUGH = 0.97, 7.0
"""What is kept of older passes behind trees or chains, and how many of both there must be."""
_STALL = 3.0
"""What is beyond this multiple of a pass's usual time says nothing of what was before it."""

_TURN, _SETTLE = 8, 2
"""Rounds of a turn with or without runners-up; and how many rounds it takes until drafts come as
they are asked for since."""
_LEAST, _MOST = 3, 12
"""Pairs of turns in a trial."""
_SCATTER = 0.35
"""Of the logarithm of two turns' speeds over each other: tokens a round scatter by .6 of their
mean, and texts differ."""
_WORTH = 0.02
"""Gain that a trial must end with if it proved nothing."""
_RECALLED = 2.0
"""The most pairs that what was known before a trial counts for."""
_REST, _LONGEST_REST = 256, 4096
"""Rounds until the next trial, twice as many after each one that changed nothing."""


class Layer(NamedTuple):
    """The nodes that one depth adds to the trees of some outcomes."""

    owners: npt.NDArray[np.intp]
    """[nodes] the outcome whose tree each is in."""
    chances: npt.NDArray[np.float64]
    """[nodes] of its whole path, given the outcome."""


class TreeGrowth:
    """The number in use; fed with what each would gain."""

    def __init__(self) -> None:
        self._gains = [0.0] * len(GROWN)
        self._chosen = 0
        self._rounds = 0

    @property
    def grown(self) -> int:
        """Runners-up of all branches that are continued at each depth."""
        return GROWN[self._chosen]

    def is_due(self) -> bool:
        """Whether this round's gains are wanted; asked once a round."""
        self._rounds += 1
        return self._rounds % _EVERY == 1

    def observe(self, gains: Sequence[float]) -> None:
        """What a round would have gained by each of GROWN, in tokens."""
        first = self._rounds <= _EVERY
        pairs = zip(self._gains, gains, strict=True)
        self._gains = [gain if first else smooth(mean, gain) for mean, gain in pairs]
        best = self._gains.index(max(self._gains))
        if self._gains[best] > _BETTER * self._gains[self._chosen]:
            self._chosen = best


class TreeTrial:
    """Whether trees pay as a whole, runners-up and all, by turns with and without them.

    A runner-up has its price before it is verified: a depth names more tokens, which the drafter
    and the orchestrator have to note, and a draft that the target waits for takes longer. So the
    speeds are measured, tokens over time, of two turns at a time.
    """

    def __init__(self) -> None:
        self.pays = False
        """What the last trial found."""
        self._gain = DiscountedRatio()
        """Mean logarithm of the speed with runners-up over that without."""
        self._turns: list[DiscountedRatio] = []
        """Of this pair, those that are over."""
        self._turn = DiscountedRatio()
        """Tokens over milliseconds."""
        self._left = _TURN
        """Rounds of this turn."""
        self._unsettled = _SETTLE
        """Rounds until one counts."""
        self._pairs = 0
        """Of this trial."""
        self._rest, self._next_rest = 0, _REST
        """Rounds until the next trial, and until the one behind it."""

    @property
    def asks(self) -> bool:
        """Whether the drafter is asked for runners-up now: in a trial by turns, else if it pays."""
        if self._rest:
            return self.pays
        return (len(self._turns) + self._pairs) % 2 == 1  # every other pair begins with them

    def note_round(self, seen: RoundObservation) -> None:
        """Take note of any round: behind some the next ones have no draft, or an old one."""
        alone = seen.speculating and seen.sequences == 1 and seen.idle_ms is not None
        if not alone or not seen.chooses_trees:
            self._unsettled = _SETTLE

    def observe(self, tokens: int, milliseconds: float) -> None:
        """Measure a drafted round of a request that is alone, with the wait before it."""
        if self._rest:
            self._rest, self._unsettled = self._rest - 1, _SETTLE
        elif self._unsettled:
            self._unsettled -= 1
        else:
            self._take_in(tokens, milliseconds)

    def _take_in(self, tokens: int, milliseconds: float) -> None:
        self._turn.observe(tokens, milliseconds)
        self._left -= 1
        if self._left:
            return
        asked = self.asks
        self._turns.append(self._turn)
        self._turn, self._left = DiscountedRatio(), _TURN
        if len(self._turns) == 2:
            self._compare()
        if self.asks != asked:
            self._unsettled = _SETTLE

    def _compare(self) -> None:
        without, with_them = self._turns if self._pairs % 2 == 0 else reversed(self._turns)
        if without.value and with_them.value:  # else times are missing
            self._gain.observe(log(with_them.value / without.value))
        self._turns, self._pairs = [], self._pairs + 1
        gain = self._gain.value
        proved = gain * sqrt(self._gain.whole) > _SCATTER
        if self._pairs >= _LEAST and (proved or gain <= 0.0 or self._pairs >= _MOST):
            self._conclude(pays=proved or gain > _WORTH)

    def _conclude(self, *, pays: bool) -> None:
        self._rest = self._next_rest if pays == self.pays else _REST
        self._next_rest = min(_LONGEST_REST, 2 * self._rest)
        self.pays, self._pairs = pays, 0
        self._gain = _mean(self._gain.value, min(_RECALLED, self._gain.whole))


def _mean(value: float, weight: float) -> DiscountedRatio:
    return DiscountedRatio(value * weight, weight)


class CostBehindTrees:
    """How much longer the pass behind a tree takes than one behind a chain.

    Rows of a tree that stand have to be moved together first, and so nothing may have been launched
    for what comes next.
    """

    def __init__(self) -> None:
        self._longer_ms = {kind: DiscountedRatio() for kind in (False, True)}
        """Than usual, over passes, behind chains and behind trees."""
        self._last: bool | None = None
        """Whether the round before was a tree; None if there was none of the kind."""

    def observe(self, seen: RoundObservation, usual_ms: float) -> None:
        """Take in a round; its pass was expected to take `usual_ms`."""
        alone = seen.speculating and seen.sequences == 1
        if alone and self._last is not None and seen.idle_ms is not None:
            longer_ms = min(seen.verify_ms, _STALL * usual_ms) - usual_ms
            self._longer_ms[self._last].observe(longer_ms, fade=_FADE)
        self._last = seen.is_tree if alone else None

    @property
    def milliseconds(self) -> float:
        """At least nothing, and nothing until both were seen often enough."""
        chains, trees = self._longer_ms[False], self._longer_ms[True]
        known = min(chains.whole, trees.whole) >= _ENOUGH
        return max(0.0, trees.value - chains.value) if known else 0.0


def rank_chances(rate: float, hits: Sequence[float]) -> list[float]:
    """How likely the target's token is a drafter's first, second, ... choice.

    Args:
        rate: at which first choices are accepted.
        hits: h(0), h(1), ...: that it is among the first F runners-up if the first choice fell.
    """
    return [rate, *((1.0 - rate) * (more - less) for less, more in pairwise(hits))]


def grow(outcomes: Sequence[float], ranks: Sequence[float], grown: int, depth: int) -> list[Layer]:
    """The trees of some outcomes, depth by depth, as a drafter grows them.

    Args:
        outcomes: how likely each is.
        ranks: `rank_chances`.
        grown: how many runners-up of all trees together are continued at each depth.
        depth: how deep they get.

    Returns:
        As many as it is deep.
    """
    shares, chances = np.array(outcomes), np.array(ranks)
    owners, tips = np.arange(len(shares)), np.ones(len(shares))
    layers = []
    for _ in range(depth):
        nodes = tips[:, None] * chances
        layers.append(Layer(np.repeat(owners, len(chances)), nodes.ravel()))
        # The first tip of each outcome is its chain's; it stays in its place.
        others = nodes.copy()
        others[: len(shares), 0] = 0.0
        weights = (others * shares[owners][:, None]).ravel()
        best = np.argsort(-weights, kind="stable")[:grown]
        best = best[weights[best] > 0.0]
        tips = np.concatenate([nodes[: len(shares), 0], others.ravel()[best]])
        owners = np.concatenate([np.arange(len(shares)), owners[best // len(ranks)]])
    return layers


def value_trees(
    outcomes: Sequence[float], layers: Sequence[Layer], row_costs: Sequence[float]
) -> float:
    """What verifying the best part of each tree is expected to bring, in tokens.

    Args:
        outcomes: how likely each is.
        layers: `grow`.
        row_costs: what the first, second, ... row of a draft could have brought otherwise, in
            tokens; as many as rows can be verified.
    """
    costs = np.array(row_costs)
    owners = np.concatenate([layer.owners for layer in layers])
    chances = np.concatenate([layer.chances for layer in layers])
    order = np.lexsort((-chances, owners))
    owners, chances = owners[order], chances[order]
    places = np.arange(len(owners)) - np.searchsorted(owners, owners)
    kept = places < len(costs)
    owners, places = owners[kept], places[kept]
    gains = np.zeros((len(outcomes), len(costs)))
    gains[owners, places] = chances[kept] - costs[places]
    best = np.cumsum(gains, axis=1).max(axis=1, initial=0.0)
    return float(np.dot(outcomes, best))


def value_by_depth(
    outcomes: Sequence[float],
    ranks: Sequence[float],
    grown: int,
    depth: float,
    row_costs: Sequence[float],
) -> float:
    """The value of trees as deep as this on average; arguments as of `grow` and `value_trees`."""
    whole = int(depth)
    layers = grow(outcomes, ranks, grown, whole + 1)
    shallow = value_trees(outcomes, layers[:whole], row_costs) if whole else 0.0
    deep = value_trees(outcomes, layers, row_costs)
    return shallow + (depth - whole) * (deep - shallow)
