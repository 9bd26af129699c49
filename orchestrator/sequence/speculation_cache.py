"""The speculation cache: drafts prepared for the outcomes of the verification in flight."""

from dataclasses import dataclass, field

from protocol.decoding.sampling_params import is_valid_distribution
from protocol.messages import END_OF_BRANCH, DraftDistribution, DraftTree, Tokens

_NOT_DRAWN = DraftDistribution()


@dataclass(frozen=True)
class Draft:
    """Draft tokens, how sure the drafter is of each, and what each was drawn from."""

    tokens: Tokens = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)

    def add(self, token: int, confidence: float, drawn: DraftDistribution = _NOT_DRAWN) -> None:
        """One token more; a confidence that is no probability counts as none.

        Whether a drawn token is offered must not depend on the draw
        (`protocol.decoding.rejection`), so
        the confidence in it is a function of its distribution.
        """
        confidence = max(drawn.probabilities, default=confidence)
        self.tokens.append(token)
        self.confidences.append(confidence if 0.0 <= confidence <= 1.0 else 0.0)
        self.distributions.append(drawn)

    def grow(self, tree: DraftTree, branch: int) -> bool:
        """Take a branch's token of this depth; False if there is none that can be used."""
        if len(self) != tree.depth - 1 or branch >= min(len(tree.tokens), len(tree.confidences)):
            return False
        token = tree.tokens[branch]
        drawn = tree.distributions[branch] if branch < len(tree.distributions) else _NOT_DRAWN
        if token == END_OF_BRANCH or not is_valid_distribution(drawn, token):
            return False
        self.add(token, tree.confidences[branch], drawn)
        return True

    @property
    def drawn_from(self) -> list[DraftDistribution]:
        """The distributions as they are sent; empty if no token was drawn."""
        return self.distributions if any(one.tokens for one in self.distributions) else []

    @property
    def largest(self) -> Tokens:
        """Per draft token, the largest that might have been drawn in its place."""
        pairs = zip(self.tokens, self.distributions, strict=True)
        return [max(one.tokens, default=token) for token, one in pairs]

    def first(self, count: int) -> "Draft":
        """Its beginning."""
        return Draft(self.tokens[:count], self.confidences[:count], self.distributions[:count])

    def after(self, count: int) -> "Draft":
        """What follows its first `count` tokens."""
        return Draft(self.tokens[count:], self.confidences[count:], self.distributions[count:])

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
        self._growing: list[tuple[int, int]] = []
        """Outcomes whose branch got a token at the last depth."""
        self._depth = 0
        self._heir: tuple[int, int] | None = None
        self._inherited = Draft()

    def inherit(self, verified: int, rest: Draft) -> bool:
        """Keep what of a draft was not verified, behind its `verified` first tokens.

        If all of those are accepted and the bonus token is the first of the rest, the others
        are a draft. Under the rejection rule too: the bonus token was drawn without regard to
        the rest; the others were drawn from their own distributions behind that very token,
        with random numbers used for nothing else; and whether they are kept or offered does
        not depend on what was drawn.

        Returns:
            False if there is nothing to keep.
        """
        if len(rest) < 2:
            return False
        self._heir = verified, rest.tokens[0]
        self._inherited = rest.after(1)
        return True

    def add(self, tree: DraftTree) -> bool:
        """Add one depth; False if it does not continue what is here, and was dropped."""
        if tree.depth != self._depth + 1:
            return False
        order = tree.outcomes if tree.depth == 1 else self._order
        if not len(tree.tokens) == len(tree.confidences) == len(order):
            return False
        if len(tree.distributions) not in (0, len(order)):
            return False
        self._order = order
        self._depth = tree.depth
        if tree.depth == 1:
            self._drafts = {outcome: Draft() for outcome in order}
        self._growing = [
            outcome
            for branch, outcome in enumerate(order)
            if tree.tokens[branch] != END_OF_BRANCH and self._drafts[outcome].grow(tree, branch)
        ]
        return True

    def draft(self, accepted: int, bonus: int) -> Draft:
        """The prepared continuation of this outcome; empty on a miss."""
        prepared = self._drafts.get((accepted, bonus), Draft())
        if (accepted, bonus) == self._heir and len(self._inherited) > len(prepared):
            return self._inherited
        return prepared

    def latest_outcomes(self) -> list[tuple[int, int]]:
        """The outcomes whose drafts the last depth made longer."""
        if not self._order:
            return [self._heir] if self._heir is not None else []
        return [
            outcome
            for outcome in self._growing
            if outcome != self._heir or len(self.draft(*outcome)) == self._depth
        ]

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
        outcomes = {*self._drafts, *([self._heir] if self._heir is not None else [])}
        return sum(1 for outcome in outcomes if self.draft(*outcome))
