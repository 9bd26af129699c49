"""How a tree grows at a drafter: the order of feeding, and the growth of branches. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from protocol.decoding.sampling_params import uses_rejection
from protocol.decoding.token_tree import TokenTree
from protocol.messages import Sampling
from services.drafter.backends.base import DraftedToken, Outcome, RoundOptions, TreeLayer
from services.drafter.backends.mlx_tree import Bud
from services.sampling.candidates import Top, perturb


class Layout(NamedTuple):
    """Places of a tree's rows at a drafter: the first in the trunk, the others after it."""

    places: list[Bud]
    """Each row as the parent of its successors; the token is unused."""
    levels: list[list[tuple[int, Bud]]]
    """The rows after the trunk with what is fed for them; each level is fed at once."""


def lay_out(tree: TokenTree, base: int, *, held: int, by_depth: bool) -> Layout:
    """Return the layout of a tree whose first position is `base`.

    Args:
        held: how many of the rows of its stem are in the trunk.
        by_depth: True if a row can be fed only after its parent.
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
    """Index of the fed token that it follows; -1 for the last trunk token it attends to."""
    fork: int
    """Position of the last trunk token that it attends to."""
    place: int
    """Its index in the layer before; for a bonus token, its outcome's."""


def grow_layer(
    outcomes: list[Outcome],
    tips: list[Tip],
    candidates: list[list[DraftedToken]],
    first: int,
    options: RoundOptions,
) -> tuple[TreeLayer, list[Tip]]:
    """Return the next depth, and the tips that are fed from it.

    The best candidate of each branch continues; its siblings are leaves.

    Args:
        outcomes: the branches.
        tips: what was fed.
        candidates: for each tip, its possible successors, best first.
        first: index of the first tip among all fed tokens.
        options: whether siblings are named.
    """
    pairs = enumerate(zip(tips, candidates, strict=True), start=first)
    named = [(fed, tip, *pair) for fed, (tip, drafts) in pairs for pair in enumerate(drafts)]
    best = [
        Tip(draft.token, fed, tip.fork, place)
        for place, (fed, tip, rank, draft) in enumerate(named)
        if rank == 0
    ]
    layer = TreeLayer(
        outcomes,
        [draft.token for *_, draft in named],
        [draft.confidence for *_, draft in named],
        [draft.distribution for *_, draft in named if draft.distribution.tokens],
        [tip.place for _, tip, *_ in named] if options.siblings else [],
    )
    return layer, best


def begin_tips(outcomes: list[Outcome], places: list[Bud]) -> list[Tip]:
    """Return the bonus tokens of the branches.

    Args:
        outcomes: the branches.
        places: for each row, its place at the drafter.
    """
    return [
        Tip(bonus, places[row].parent, places[row].fork, place)
        for place, (row, bonus) in enumerate(outcomes)
    ]


def name_candidates(
    top: Top, positions: Sequence[int], sampling: Sampling, turn: RoundOptions
) -> list[list[DraftedToken]]:
    """Choose tokens as `draft_tokens` does, with the next best guesses as siblings of each.

    Drawn tokens have no siblings, so none may be requested under the rejection rule.
    """
    if not turn.siblings:
        return [[draft] for draft in draft_tokens(top, positions, sampling, turn)]
    ranked = perturb(top, [position + turn.shift for position in positions], sampling)
    named = []
    for row, tokens in enumerate(ranked.ids[:, : 1 + turn.siblings].tolist()):
        pairs = list(zip(tokens, ranked.confidences(row, len(tokens)), strict=True))
        likely = [DraftedToken(*pair) for pair in pairs[1:] if pair[1] > 0.0]
        named.append([DraftedToken(*pairs[0]), *likely])
    return named


def draft_tokens(
    top: Top, positions: Sequence[int], sampling: Sampling, turn: RoundOptions
) -> list[DraftedToken]:
    """Return the draft token after each row: a guess of the target's, or one drawn.

    Args:
        top: the candidates.
        positions: [rows] the position that the draft token will have among the backend's tokens.
        sampling: the drafter's (`sampling_params.drafter_sampling`).
        turn: the round that drafts, for the draw.
    """
    positions = [position + turn.shift for position in positions]
    if not uses_rejection(sampling):
        ranked = perturb(top, positions, sampling)
        return [
            DraftedToken(token, ranked.confidences(row, 1)[0])
            for row, token in enumerate(ranked.ids[:, 0].tolist())
        ]
    # Of the rejection rule alone.
    from protocol.decoding import rejection  # noqa: PLC0415

    drafted = []
    for ids, logits, position in zip(top.ids, top.logits, positions, strict=True):
        q = rejection.drafter_distribution(ids, logits, sampling, turn.held_back)
        token = rejection.draw_draft_token(q, position, sampling, turn.number)
        sent = rejection.to_message(q)
        drafted.append(DraftedToken(token, float(q.probabilities.max()), sent))
    return drafted
