"""Draft tokens as a tree: possible continuations of a pending token, with confidences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protocol.decoding.sampling_params import is_valid_distribution
from protocol.messages import END_OF_BRANCH, DraftDistribution, DraftTree, Tokens

_NOT_DRAWN = DraftDistribution()


@dataclass(frozen=True)
class Draft:
    """Draft tokens after a pending token; a chain is a tree without siblings.

    Row 0 is the pending token, row i the i-th token of the draft. A parent comes before its
    children, and a likelier child before its siblings.
    """

    tokens: Tokens = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)
    """Distribution that each token was sampled from."""
    parents: list[int] = field(default_factory=list)
    """Row of each token's parent; missing ones follow one another."""

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
        """Append a token after the last row, or after the row `parent`; return its row.

        A confidence that is not a probability is replaced by 0. Whether a sampled token is offered
        must not depend on the sample (`protocol.decoding.rejection`), so its confidence is a
        function of its distribution.
        """
        confidence = max(drawn.probabilities, default=confidence)
        self.parents.append(len(self) if parent is None else parent)
        self.tokens.append(token)
        self.confidences.append(confidence if 0.0 <= confidence <= 1.0 else 0.0)
        self.distributions.append(drawn)
        return len(self)

    def grow(self, tree: DraftTree, index: int, parent: int) -> int | None:
        """Append a token of a depth after the row `parent`; return None if it cannot be used."""
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
        """True if every token follows the previous one."""
        return all(index == parent for index, parent in enumerate(self.parents))

    @property
    def sent_parents(self) -> list[int]:
        """The parents in the format of messages: empty for a chain."""
        return [] if self.is_chain else self.parents

    @property
    def main(self) -> list[int]:
        """Rows of the first children, from the root on: the chain without the siblings."""
        rows, last = [], 0
        for row, parent in enumerate(self.parents, 1):
            if parent == last:
                rows.append(row)
                last = row
        return rows

    @property
    def depths(self) -> list[int]:
        """Number of tokens on the path to each row; 0 for the pending token."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Number of tokens of the longest path."""
        return max(self.depths)

    def path(self, row: int) -> list[int]:
        """Return the rows on the path to this one, itself included, without the pending token."""
        rows = []
        while row > 0:
            rows.append(row)
            row = self.parents[row - 1]
        return rows[::-1]

    def tokens_to(self, row: int) -> Tokens:
        """Return the tokens on the path to this row, its own included."""
        return [self.tokens[node - 1] for node in self.path(row)]

    def children(self, row: int) -> list[int]:
        """Return the rows of its children, most likely first."""
        return [index for index, parent in enumerate(self.parents, 1) if parent == row]

    # ------------------------------------------------------------ parts of it

    def arrange(self, rows: Iterable[int]) -> list[int]:
        """Return these rows in preorder: the most likely path is contiguous, and first.

        Args:
            rows: rows to arrange, each with its parent.
        """
        ascending = sorted(rows)
        if all(row == 1 + index for index, row in enumerate(ascending)) and self.is_chain:
            return ascending
        behind: dict[int, list[int]] = {}
        for row in reversed(ascending):
            behind.setdefault(self.parents[row - 1], []).append(row)
        ordered, waiting = [], behind.get(0, [])
        while waiting:
            ordered.append(waiting.pop())
            waiting += behind.get(ordered[-1], [])
        return ordered

    def pick(self, rows: Sequence[int]) -> "Draft":
        """Return a draft of these rows, in this order; each follows its parent."""
        places = {0: 0, **{row: place for place, row in enumerate(rows, 1)}}
        return Draft(
            [self.tokens[row - 1] for row in rows],
            [self.confidences[row - 1] for row in rows],
            [self.distributions[row - 1] for row in rows] if self.distributions else [],
            [places[self.parents[row - 1]] for row in rows],
        )

    def below(self, row: int) -> "Draft":
        """Return the subtree after the token of this row."""
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
        """The distributions in the format of messages; empty if no token was sampled."""
        return self.distributions if any(drawn.tokens for drawn in self.distributions) else []

    @property
    def largest(self) -> Tokens:
        """The largest token that might have been sampled in place of each draft token."""
        if not any(drawn.tokens for drawn in self.distributions):
            return self.tokens
        pairs = zip(self.tokens, self.distributions, strict=True)
        return [max(drawn.tokens, default=token) for token, drawn in pairs]

    def __len__(self) -> int:
        return len(self.tokens)
