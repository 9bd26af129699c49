"""A tree of tokens under verification: the pending token, and drafts that share beginnings.

Its rows are in the order of the message, parents before children; row 0 is the pending token.
A chain is the tree in which each row follows the one before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from protocol.errors import ProtocolError
from protocol.messages import MAX_NODES, Tokens

TREE_ROWS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Sizes of trees, the pending token included: on a GPU the first pass over each number of rows
prepares kernels, which takes as long as several others."""
CHAIN_ROWS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32)
"""Sizes of chains, likewise."""


@dataclass(frozen=True)
class TokenTree:
    """See the module; `read_tree` makes one of a message's fields."""

    tokens: Tokens
    parents: list[int]
    """Row of the parent of each row but the first."""

    @cached_property
    def is_chain(self) -> bool:
        """Whether each row follows the one before it."""
        return self.parents == list(range(len(self.parents)))

    @cached_property
    def stem(self) -> int:
        """How many rows, from the first on, each follow the one before."""
        pairs = enumerate(self.parents)
        return next((row for row, parent in pairs if row != parent), len(self.parents)) + 1

    @property
    def sent_parents(self) -> list[int]:
        """The parents as messages carry them: none for a chain."""
        return [] if self.is_chain else self.parents

    @cached_property
    def depths(self) -> list[int]:
        """Of each row, its steps from the first: its position, counted from that of row 0."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return found

    def path(self, row: int) -> list[int]:
        """The rows from the first to this one."""
        rows = [row]
        while rows[-1]:
            rows.append(self.parents[rows[-1] - 1])
        return rows[::-1]

    def tokens_to(self, row: int) -> Tokens:
        """The tokens of `path`."""
        return [self.tokens[one] for one in self.path(row)]

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """Of each row, its children: token -> row."""
        found: list[dict[int, int]] = [{} for _ in self.tokens]
        for row, parent in enumerate(self.parents, start=1):
            found[parent][self.tokens[row]] = row
        return found

    def visible(self) -> npt.NDArray[np.bool_]:
        """[rows, rows] which rows each row sees: its ancestors, and itself."""
        seen = np.eye(len(self.tokens), dtype=np.bool_)
        for row, parent in enumerate(self.parents, start=1):
            seen[row] |= seen[parent]
        return seen

    def walk(self, chosen: Sequence[int]) -> list[int]:
        """The rows that stand, from the first on: each is its parent's choice.

        Args:
            chosen: [rows] the target's own token after each row.
        """
        rows = [0]
        while (row := self.children[rows[-1]].get(chosen[rows[-1]])) is not None:
            rows.append(row)
        return rows

    def find(self, tokens: Sequence[int]) -> int:
        """The row that these tokens lead to, the pending token left out."""
        row = 0
        for token in tokens:
            row = self.children[row][token]
        return row

    def keep(self, rows: Sequence[int]) -> "TokenTree":
        """The tree of these rows alone, in rising order; the parent of each must be among them."""
        places = {row: place for place, row in enumerate(rows)}
        tokens = [self.tokens[row] for row in rows]
        return TokenTree(tokens, [places[self.parents[row - 1]] for row in rows[1:]])

    def __len__(self) -> int:
        return len(self.tokens)


def read_tree(tokens: Tokens, parents: Sequence[int]) -> TokenTree:
    """The tree that a message means; without parents, a chain.

    Raises:
        ProtocolError: it is no tree, siblings are alike, or it is too large.
    """
    if not tokens:
        raise ProtocolError("a tree without tokens has no pending token")
    if not parents:
        return TokenTree(tokens, list(range(len(tokens) - 1)))
    if len(parents) != len(tokens) - 1:
        raise ProtocolError(f"{len(parents)} parents for {len(tokens) - 1} draft tokens")
    if len(parents) > MAX_NODES:
        raise ProtocolError(f"a tree of {len(parents)} draft tokens has more than {MAX_NODES}")
    for row, parent in enumerate(parents, start=1):
        if not 0 <= parent < row:
            raise ProtocolError(f"row {row} of a tree cannot follow row {parent}")
    pairs = set(zip(parents, tokens[1:], strict=True))
    if len(pairs) < len(parents):
        raise ProtocolError("two siblings of a tree are the same token")
    return TokenTree(tokens, list(parents))
