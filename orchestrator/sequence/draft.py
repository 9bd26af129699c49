"""Draft tokens as a tree: what may follow a pending token, and how sure the drafter is of each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protocol.decoding.sampling_params import is_valid_distribution
from protocol.messages import END_OF_BRANCH, DraftDistribution, DraftTree, Tokens

_NOT_DRAWN = DraftDistribution()


@dataclass(frozen=True)
class Draft:
    """Draft tokens behind a pending token; a chain is the tree without siblings.

    Row 0 is the pending token, row i the i-th token of the draft. A parent comes before its
    children, and the likelier child before its siblings.
    """

    tokens: Tokens = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)
    """What each token was drawn from."""
    parents: list[int] = field(default_factory=list)
    """The row of each token's parent; those that are not given follow one another."""

    def __post_init__(self) -> None:
        self.parents.extend(range(len(self.parents), len(self.tokens)))

    def add(
        self,
        token: int,
        confidence: float,
        drawn: DraftDistribution = _NOT_DRAWN,
        *,
        parent: int | None = None,
    ) -> int:
        """One token more, behind the last one or behind the row `parent`; returns its row.

        A confidence that is no probability counts as none. Whether a drawn token is offered
        must not depend on the draw (`protocol.decoding.rejection`), so the confidence in it is
        a function of its distribution.
        """
        confidence = max(drawn.probabilities, default=confidence)
        self.parents.append(len(self) if parent is None else parent)
        self.tokens.append(token)
        self.confidences.append(confidence if 0.0 <= confidence <= 1.0 else 0.0)
        self.distributions.append(drawn)
        return len(self)

    def grow(self, tree: DraftTree, index: int, parent: int) -> int | None:
        """Take a depth's token behind the row `parent`; None if it cannot be used."""
        if index >= min(len(tree.tokens), len(tree.confidences)):
            return None
        token = tree.tokens[index]
        drawn = tree.distributions[index] if index < len(tree.distributions) else _NOT_DRAWN
        if token == END_OF_BRANCH or not is_valid_distribution(drawn, token):
            return None
        return self.add(token, tree.confidences[index], drawn, parent=parent)

    # ------------------------------------------------------------ its shape

    @property
    def is_chain(self) -> bool:
        """Whether every token follows the one before it."""
        return all(index == parent for index, parent in enumerate(self.parents))

    @property
    def sent_parents(self) -> list[int]:
        """The parents as messages carry them: none for a chain."""
        return [] if self.is_chain else self.parents

    @property
    def main(self) -> list[int]:
        """The rows of the first children, from the root on: the chain without the siblings."""
        rows, last = [], 0
        for row, parent in enumerate(self.parents, 1):
            if parent == last:
                rows.append(row)
                last = row
        return rows

    @property
    def depths(self) -> list[int]:
        """Per row, how many tokens lead to it; the pending token's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(self.depths)

    def path(self, row: int) -> list[int]:
        """The rows that lead to this one, itself included, the pending token's not."""
        rows = []
        while row > 0:
            rows.append(row)
            row = self.parents[row - 1]
        return rows[::-1]

    def tokens_to(self, row: int) -> Tokens:
        """The tokens that lead to this row, its own included."""
        return [self.tokens[one - 1] for one in self.path(row)]

    def children(self, row: int) -> list[int]:
        """The rows whose parent it is, likeliest first."""
        return [index for index, parent in enumerate(self.parents, 1) if parent == row]

    # ------------------------------------------------------------ parts of it

    def arrange(self, rows: Iterable[int]) -> list[int]:
        """These rows in preorder: the likeliest path stands together, and first.

        Args:
            rows: any; each with its parent.
        """
        wanted = sorted(rows)
        if all(row == 1 + index for index, row in enumerate(wanted)) and self.is_chain:
            return wanted
        behind: dict[int, list[int]] = {}
        for row in reversed(wanted):
            behind.setdefault(self.parents[row - 1], []).append(row)
        ordered, waiting = [], behind.get(0, [])
        while waiting:
            ordered.append(waiting.pop())
            waiting += behind.get(ordered[-1], [])
        return ordered

    def pick(self, rows: Sequence[int]) -> "Draft":
        """A draft of these rows, in this order; each stands behind its parent."""
        places = {0: 0, **{row: place for place, row in enumerate(rows, 1)}}
        return Draft(
            [self.tokens[row - 1] for row in rows],
            [self.confidences[row - 1] for row in rows],
            [self.distributions[row - 1] for row in rows] if self.distributions else [],
            [places[self.parents[row - 1]] for row in rows],
        )

    def below(self, row: int) -> "Draft":
        """What follows the token of this row."""
        places: dict[int, int] = {row: 0}
        rows: list[int] = []
        for index, parent in enumerate(self.parents[row:], row + 1):
            if parent in places:
                places[index] = 1 + len(rows)
                rows.append(index)
        return Draft(
            [self.tokens[index - 1] for index in rows],
            [self.confidences[index - 1] for index in rows],
            [self.distributions[index - 1] for index in rows] if self.distributions else [],
            [places[self.parents[index - 1]] for index in rows],
        )

    # ------------------------------------------------------------ drawn tokens

    @property
    def drawn_from(self) -> list[DraftDistribution]:
        """The distributions as they are sent; empty if no token was drawn."""
        return self.distributions if any(one.tokens for one in self.distributions) else []

    @property
    def largest(self) -> Tokens:
        """Per draft token, the largest that might have been drawn in its place."""
        if not any(one.tokens for one in self.distributions):
            return self.tokens
        pairs = zip(self.tokens, self.distributions, strict=True)
        return [max(one.tokens, default=token) for token, one in pairs]

    def __len__(self) -> int:
        return len(self.tokens)
