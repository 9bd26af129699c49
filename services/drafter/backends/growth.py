"""How a tree grows at a drafter: what is fed in which order, and how branches go on. Pure."""

from collections.abc import Sequence
from math import inf, log
from typing import NamedTuple

import numpy as np

from protocol.decoding.token_tree import TokenTree
from services.drafter.backends.base import DraftedToken, Outcome, RoundOptions, TreeLayer
from services.drafter.backends.mlx_tree import Bud
from services.sampling.candidates import Top


class Layout(NamedTuple):
    """Where the rows of a tree are at a drafter: the first in the trunk, the others behind it."""

    places: list[Bud]
    """Of each row, as the parent of what follows it: the token is not looked at."""
    levels: list[list[tuple[int, Bud]]]
    """The rows behind the trunk with what is fed for them; each level is fed at once."""


def lay_out(tree: TokenTree, base: int, *, held: int, by_depth: bool) -> Layout:
    """Where a tree goes that begins at position `base`.

    Args:
        held: how many of the rows of its stem are in the trunk.
        by_depth: whether a row can be fed only after its parent.
    """
    rows = list(range(held, len(tree)))
    if by_depth:
        rows.sort(key=lambda row: tree.depths[row])
    index = {row: place for place, row in enumerate(rows)}
    places = [Bud(tree.tokens[row], -1, base + row) for row in range(held)]
    levels: list[list[tuple[int, Bud]]] = []
    fed: dict[int, Bud] = {}
    for row in range(held, len(tree)):
        parent = tree.parents[row - 1] if row else -1
        fork = places[parent].fork if row else base - 1
        fed[row] = Bud(tree.tokens[row], index.get(parent, -1), fork)
        places.append(Bud(tree.tokens[row], index[row], fork))
    for row in rows:
        if not levels or (by_depth and tree.depths[levels[-1][0][0]] < tree.depths[row]):
            levels.append([])
        levels[-1].append((row, fed[row]))
    return Layout(places, levels)


class Tip(NamedTuple):
    """A drafted token that is fed next."""

    token: int
    parent: int
    """Which of the tokens fed before it follows; -1: the trunk's last one that it sees."""
    fork: int
    """Position of the last trunk token that it sees."""
    place: int
    """Its index in the layer before; of a bonus token, its outcome's."""
    is_best: bool
    """Whether it and all before it, back to the bonus token, were the likeliest candidates."""
    score: float
    """Logarithm of how likely its path is, as the drafter sees it."""


def grow_layer(
    outcomes: list[Outcome],
    tips: list[Tip],
    candidates: list[list[DraftedToken]],
    first: int,
    options: RoundOptions,
) -> tuple[TreeLayer, list[Tip]]:
    """The next depth, and what of it is fed.

    The best candidate of each branch always goes on, so that a branch is never shorter than
    without siblings; of all others those of the likeliest paths.

    Args:
        outcomes: the branches.
        tips: what was fed.
        candidates: of each tip, what may follow, best first.
        first: index of the first tip among all that was fed.
        options: whether siblings are named, and how many of them go on.
    """
    pairs = enumerate(zip(tips, candidates, strict=True), start=first)
    named = [(fed, tip, *pair) for fed, (tip, drafts) in pairs for pair in enumerate(drafts)]
    followers = [
        Tip(draft.token, fed, tip.fork, place, tip.is_best and rank == 0, _add_log(tip, draft))
        for place, (fed, tip, rank, draft) in enumerate(named)
    ]
    best = [tip for tip in followers if tip.is_best]
    others = sorted((tip for tip in followers if not tip.is_best), key=lambda tip: -tip.score)
    layer = TreeLayer(
        outcomes,
        [draft.token for *_, draft in named],
        [draft.confidence for *_, draft in named],
        [draft.distribution for *_, draft in named if draft.distribution.tokens],
        [tip.place for _, tip, *_ in named] if options.siblings else [],
    )
    return layer, [*best, *others[: options.grown_siblings]]


def _add_log(tip: Tip, draft: DraftedToken) -> float:
    """How likely the path to this token is."""
    return tip.score + (log(draft.confidence) if draft.confidence > 0.0 else -inf)


def begin_tips(
    outcomes: list[Outcome], tree: TokenTree, tops: Sequence[Top | None], places: list[Bud]
) -> list[Tip]:
    """The bonus tokens of the branches, with how likely each outcome is.

    Args:
        outcomes: the branches.
        tree: what is verified.
        tops: of each row, the candidates after it, under the noise if there is any. None: what
            follows it counts as certain.
        places: of each row, where it is at the drafter.
    """
    reached = [0.0]
    for row, parent in enumerate(tree.parents, start=1):
        reached.append(reached[parent] + _likelihood(tops[parent], tree.tokens[row]))
    return [
        Tip(
            bonus,
            places[row].parent,
            places[row].fork,
            place,
            is_best=True,
            score=reached[row] + _likelihood(tops[row], bonus),
        )
        for place, (row, bonus) in enumerate(outcomes)
    ]


def _likelihood(top: Top | None, token: int) -> float:
    """Logarithm of the drafter's probability; the last candidate's if it is none of them."""
    if top is None:
        return 0.0
    found = np.flatnonzero(top.ids[0] == token)
    logit = top.logits[0, found[0]] if found.size else top.logits[0].min()
    return float(logit - top.totals[0])
