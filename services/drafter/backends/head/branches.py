"""Branches of a block-drafting head: how they fork and grow, without side effects."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.messages import END_OF_BRANCH, DraftDistribution, Tokens
from services.drafter.backends.base import DraftedToken, TreeLayer
from services.drafter.backends.growth import Tip


@dataclass
class Branch:
    """A path through a block: its known tokens and its drafted ones."""

    tokens: Tokens
    """From the block's first position on."""
    processor: LogitsProcessor | None
    block: int = 0
    """Index of its block in a pass."""


Growth = list[tuple[Tip, Branch]]
"""Branches, with their places in the tree."""


def extend(branch: Branch, token: int) -> Branch:
    """Return a copy of the branch with another token."""
    processor = branch.processor
    if processor is not None:
        processor = processor.branch(len(processor))
        processor.extend([token])
    return replace(branch, tokens=[*branch.tokens, token], processor=processor)


def follow(tips: list[Tip], branches: list[Branch]) -> Iterator[tuple[Tip, Branch]]:
    """Extend the branches by these tokens after their parents; an only child needs no copy."""
    children = Counter(tip.parent for tip in tips)
    for tip in tips:
        branch = branches[tip.parent]
        if children[tip.parent] > 1:
            yield tip, extend(branch, tip.token)
            continue
        branch.tokens.append(tip.token)
        if branch.processor is not None:
            branch.processor.extend([tip.token])
        yield tip, branch


def rate(named: list[DraftedToken], sure: float) -> list[DraftedToken]:
    """Return candidates with the head's own confidence in the best of them.

    The others share the rest by their probabilities, and stay below it.
    """
    best, *others = named
    rest = 1.0 - best.confidence
    share = (1.0 - sure) / rest if rest > 0.0 else 0.0
    behind = [one._replace(confidence=min(sure, share * one.confidence)) for one in others]
    return [best._replace(confidence=sure), *behind]


def pad_ended(layer: TreeLayer, places: list[int]) -> TreeLayer:
    """Return a depth without siblings that has a token, or an end mark, for each outcome.

    Args:
        layer: the tokens of continuing branches.
        places: their outcomes.
    """
    if len(places) == len(layer.outcomes):
        return layer
    columns = {place: column for column, place in enumerate(places)}
    order = [columns.get(place) for place in range(len(layer.outcomes))]
    drawn = layer.distributions
    return TreeLayer(
        layer.outcomes,
        [END_OF_BRANCH if one is None else layer.tokens[one] for one in order],
        [0.0 if one is None else layer.confidences[one] for one in order],
        [DraftDistribution() if one is None else drawn[one] for one in order] if drawn else [],
    )
