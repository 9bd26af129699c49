"""The draft of the one outcome that will come, as the modelled drafter grows it.

Drafts for other outcomes would be dropped unseen; planning for them is most of the work of a
simulation. They count where runners-up of all branches compete for being continued.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from orchestrator.simulation.oracle import Oracle
from protocol.messages import END_OF_BRANCH, DraftNow, Prepare


class _Tip(NamedTuple):
    """A drafted token that is fed next."""

    place: int
    """Its index in the layer before; of the bonus token, its outcome's."""
    on_track: bool
    """Whether it and all before it are the target's."""
    chance: float
    """How likely its path is, as the drafter sees it."""


class BranchModel:
    """Grows as `services.drafter.backends.growth` does.

    Args:
        oracle: knows the target's tokens.
        position: of the first draft token.
        options: how many siblings are named, and how many of them go on.
        shares: how likely each prepared outcome is.
        coming: which of them will come; None: none of them.
    """

    def __init__(
        self,
        oracle: Oracle,
        position: int,
        options: Prepare | DraftNow,
        shares: Sequence[float],
        coming: int | None,
    ) -> None:
        self._oracle, self._position, self._options = oracle, position, options
        self._shares = np.array(shares)
        self._coming = coming
        self._tips = [] if coming is None else [_Tip(coming, on_track=True, chance=1.0)]

    def grow(self, branches: int) -> dict[str, Any]:
        """The next depth: fields of a `DraftTree`."""
        siblings = self._options.siblings
        tokens, confidences, parents = list[int](), list[float](), list[int]()
        nodes: list[_Tip] = []
        for tip in self._tips:
            named = self._name(siblings, on_track=tip.on_track)
            for token, sure in named:
                right = tip.on_track and token == self._oracle.token(self._position)
                nodes.append(_Tip(len(tokens), right, tip.chance * sure))
                tokens.append(token)
                confidences.append(sure)
                parents.append(tip.place)
        self._tips = self._choose(nodes)
        self._position += 1
        if siblings and nodes:
            return {"tokens": tokens, "confidences": confidences, "parents": parents}
        plain, sure = [END_OF_BRANCH] * branches, 0.0
        if self._coming is not None:
            plain[self._coming], sure = tokens[0], confidences[0]
            self._tips = [self._tips[0]._replace(place=self._coming)]
        return {"tokens": plain, "confidences": [sure] * branches}

    def _name(self, siblings: int, *, on_track: bool) -> list[tuple[int, float]]:
        oracle, position = self._oracle, self._position
        best = oracle.best_guess(position), oracle.confidence(position, on_track=on_track)
        return [best, *oracle.siblings(position, siblings, on_track=on_track)]

    def _choose(self, nodes: list[_Tip]) -> list[_Tip]:
        """What is fed next: the chain's, and its share of the likeliest of all branches.

        The other branches are taken to look like this one.
        """
        if not nodes or self._coming is None:
            return nodes
        chain, others = nodes[0], sorted(nodes[1:], key=lambda one: -one.chance)
        grown = self._options.grown_siblings
        if not grown or not others:
            return [chain]
        weights = self._shares[:, None] * np.array([one.chance for one in others])
        if weights.size <= grown:
            return [chain, *others]
        least = np.partition(weights.ravel(), -grown)[-grown]
        kept = int((weights[self._coming] >= least).sum())
        return [chain, *others[: min(kept, grown)]]
