"""The speculation cache: drafts prepared for the outcomes of the verification in flight."""

from dataclasses import dataclass, field

from protocol.messages import ENDED, DraftTree, Tokens


@dataclass(frozen=True)
class Draft:
    """Draft tokens, and how sure the drafter is of each."""

    tokens: Tokens = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    def add(self, token: int, confidence: float) -> None:
        """One token more; a confidence that is no probability counts as none."""
        self.tokens.append(token)
        self.confidences.append(confidence if 0.0 <= confidence <= 1.0 else 0.0)

    def first(self, count: int) -> "Draft":
        """Its beginning."""
        return Draft(self.tokens[:count], self.confidences[:count])

    def __len__(self) -> int:
        return len(self.tokens)


class SpeculationCache:
    """Map outcome (accepted, bonus) -> draft, filled depth by depth while the target works.

    It holds the branches of one round at a time. An outcome counts as prepared once its
    branch has a token.
    """

    def __init__(self) -> None:
        self._drafts: dict[tuple[int, int], Draft] = {}
        self._order: list[tuple[int, int]] = []
        self._depth = 0

    def add(self, tree: DraftTree) -> bool:
        """Add one depth; False if it does not continue what is here, and was dropped."""
        if tree.depth != self._depth + 1:
            return False
        order = tree.outcomes if tree.depth == 1 else self._order
        if not len(tree.tokens) == len(tree.confidences) == len(order):
            return False
        self._order = order
        self._depth = tree.depth
        steps = zip(order, tree.tokens, tree.confidences, strict=True)
        for outcome, token, confidence in steps:
            draft = self._drafts.setdefault(outcome, Draft())
            if token != ENDED and len(draft) == tree.depth - 1:
                draft.add(token, confidence)
        return True

    def draft(self, accepted: int, bonus: int) -> Draft:
        """The prepared continuation of this outcome; empty on a miss."""
        return self._drafts.get((accepted, bonus), Draft())

    def grown(self) -> list[tuple[int, int]]:
        """The outcomes whose drafts reach the depth that was added last."""
        return [o for o in self._order if len(self._drafts[o]) == self._depth]

    def rank(self, accepted: int, bonus: int) -> tuple[int | None, int]:
        """Which of the bonus tokens prepared at this acceptance length it is, and of how many.

        The best candidate is 0; None stands for none of them.
        """
        bonuses = [token for length, token in self._order if length == accepted]
        return (bonuses.index(bonus) if bonus in bonuses else None), len(bonuses)

    @property
    def depth(self) -> int:
        """How deep the branches are."""
        return self._depth

    def __len__(self) -> int:
        return sum(1 for draft in self._drafts.values() if draft)
