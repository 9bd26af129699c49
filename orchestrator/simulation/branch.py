"""The draft of the outcome that will occur, as the modelled drafter grows it.

Drafts for other outcomes would be dropped anyway; planning for them is most of the work of a
simulation.
"""

from typing import Any

from orchestrator.simulation.oracle import Oracle
from protocol.messages import END_OF_BRANCH


class BranchModel:
    """Grows like `services.drafter.backends.growth`: a chain, perhaps with siblings.

    Args:
        oracle: the script of the target's tokens.
        position: position of the first draft token.
        siblings: number of alternatives for each token.
        coming: index of the prepared outcome that will occur, or None.
    """

    def __init__(self, oracle: Oracle, position: int, siblings: int, coming: int | None) -> None:
        self._oracle, self._position, self._siblings = oracle, position, siblings
        self._coming = coming
        self._on_track, self._parent = True, coming or 0

    def grow(self, branches: int) -> dict[str, Any]:
        """Return the next depth: fields of a `DraftTree`."""
        named = self._name() if self._coming is not None else []
        self._position += 1
        tokens, sure = [token for token, _ in named], [confidence for _, confidence in named]
        if self._siblings and named:
            parents, self._parent = [self._parent] * len(named), 0
            return {"tokens": tokens, "confidences": sure, "parents": parents}
        plain, confidence = [END_OF_BRANCH] * branches, 0.0
        if self._coming is not None:
            plain[self._coming], confidence = tokens[0], sure[0]
        return {"tokens": plain, "confidences": [confidence] * branches}

    def _name(self) -> list[tuple[int, float]]:
        oracle, position, on_track = self._oracle, self._position, self._on_track
        best = oracle.best_guess(position)
        named = [(best, oracle.confidence(position, on_track=on_track))]
        named += oracle.siblings(position, self._siblings, on_track=on_track)
        self._on_track = on_track and best == oracle.token(position)
        return named
