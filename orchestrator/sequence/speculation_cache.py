"""The speculation cache: drafts prepared for the outcomes of the verification in flight."""

from collections.abc import Iterable, Sequence

from orchestrator.sequence.draft import Draft
from protocol.messages import END_OF_BRANCH, DraftTree

OutcomeKey = tuple[int, int]
"""The row of the last accepted node, and the bonus token."""

BACKUP: OutcomeKey = (0, 0)
"""Key of the only outcome of a draft made while the target waits."""


class SpeculationCache:
    """Map outcome (row, bonus) -> draft, filled depth by depth while the target works.

    It holds the branches of one round at a time. An outcome counts as prepared once its
    branch has a token.
    """

    def __init__(self) -> None:
        self._drafts: dict[OutcomeKey, Draft] = {}
        self._order: list[OutcomeKey] = []
        self._ends: list[tuple[OutcomeKey, int] | None] = []
        """Location of the last depth's tokens: an outcome and a row of its draft; None for a
        rejected token.
        """
        self._depth = 0
        self._inherited: dict[OutcomeKey, Draft] = {}

    def inherit(self, offered: Draft, rows: Sequence[int]) -> None:
        """Keep the part of a draft that is not verified.

        If the bonus token turns out to be one that was left out, its subtree is a draft. This also
        holds under the rejection rule: the bonus token was drawn independently of the rest; the
        other tokens were drawn from their own distributions after that very token, with random
        numbers used for nothing else; and whether they are kept or offered does not depend on the
        samples.

        Args:
            offered: the whole draft.
            rows: its verified rows, in that order; each with its parent.
        """
        verified = {0: 0, **{row: place for place, row in enumerate(rows, 1)}}
        for row, parent in enumerate(offered.parents, 1):
            if row in verified or parent not in verified:
                continue
            if behind := offered.below(row):
                self._inherited[verified[parent], offered.tokens[row - 1]] = behind

    def add(self, tree: DraftTree) -> bool:
        """Add one depth; return False, and drop it, if it does not continue the cached branches."""
        if tree.depth != self._depth + 1:
            return False
        order = tree.outcomes if tree.depth == 1 else self._order
        before = len(order) if tree.depth == 1 else len(self._ends)
        if not is_well_formed(tree, before):
            return False
        if tree.depth == 1:
            self._drafts = {outcome: Draft() for outcome in order}
            # Of duplicate outcomes, the first branch is kept.
            first = {outcome: index for index, outcome in reversed(list(enumerate(order)))}
            self._ends = [(o, 0) if first[o] == index else None for index, o in enumerate(order)]
        self._order, self._depth = order, tree.depth
        behind = [self._ends[parent] for parent in tree.parents or range(before)]
        self._ends = [self._grow(tree, index, end) for index, end in enumerate(behind)]
        return True

    def _grow(
        self, tree: DraftTree, index: int, end: tuple[OutcomeKey, int] | None
    ) -> tuple[OutcomeKey, int] | None:
        if end is None:
            return None
        outcome, parent = end
        row = self._drafts[outcome].grow(tree, index, parent)
        return (outcome, row) if row is not None else None

    def draft(self, row: int, bonus: int) -> Draft:
        """Return the prepared continuation of this outcome; empty on a miss."""
        prepared = self._drafts.get((row, bonus), Draft())
        inherited = self._inherited.get((row, bonus))
        if inherited is not None and inherited.depth > prepared.depth:
            return inherited
        return prepared

    def rank(self, row: int, bonus: int) -> tuple[int | None, int]:
        """Return the rank of a bonus token among those prepared after this row, and their number.

        The best candidate has rank 0; None means that it was not prepared.
        """
        bonuses = [token for accepted, token in self._order if accepted == row]
        return (bonuses.index(bonus) if bonus in bonuses else None), len(bonuses)

    @property
    def depth(self) -> int:
        """Depth of the branches."""
        return self._depth

    def __len__(self) -> int:
        return sum(1 for outcome in {*self._drafts, *self._inherited} if self.draft(*outcome))


def is_well_formed(tree: DraftTree, before: int) -> bool:
    """Return True if a depth can follow one of `before` tokens: counts fit, no token is
    repeated.
    """
    count = len(tree.tokens)
    if len(tree.confidences) != count or len(tree.distributions) not in (0, count):
        return False
    if not tree.parents:
        return count == before
    if len(tree.parents) != count or not all(0 <= parent < before for parent in tree.parents):
        return False
    return _are_distinct(zip(tree.parents, tree.tokens, strict=True))


def _are_distinct(children: Iterable[tuple[int, int]]) -> bool:
    tokens = [child for child in children if child[1] != END_OF_BRANCH]
    return len(tokens) == len(set(tokens))
