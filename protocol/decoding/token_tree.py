"""A tree of tokens to verify: the pending token, and drafts with shared prefixes.

Its rows are in the order of the message, parents before children; row 0 is the pending token. A
chain is the tree in which each row follows the one before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from protocol.errors import ProtocolError
from protocol.messages import MAX_NODES, Tokens

TREE_ROWS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Sizes of trees, pending token included: on a GPU the first pass over each number of rows
prepares kernels, which takes as long as several further passes.
"""
CHAIN_ROWS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32)
"""Sizes of chains, for the same reason."""


@dataclass(frozen=True)
class TokenTree:
    """A token tree (see the module); `read_tree` creates one from a message's fields."""

    tokens: Tokens
    parents: list[int]
    """Row of the parent of each row but the first."""

    @cached_property
    def is_chain(self) -> bool:
        """True if each row follows the previous one."""
        return self.parents == list(range(len(self.parents)))

    @cached_property
    def stem(self) -> int:
        """Number of leading rows that each follow the previous one."""
        pairs = enumerate(self.parents)
        return next((row for row, parent in pairs if row != parent), len(self.parents)) + 1

    @property
    def sent_parents(self) -> list[int]:
        """The parents in the format of messages: empty for a chain."""
        return [] if self.is_chain else self.parents

    @cached_property
    def depths(self) -> list[int]:
        """Steps of each row from the first: its position relative to row 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def path(self, row: int) -> list[int]:
        """Return the rows from the first to this one."""
        rows = [row]
        while rows[-1]:
            rows.append(self.parents[rows[-1] - 1])
        return rows[::-1]

    def tokens_to(self, row: int) -> Tokens:
        """Return the tokens of `path`."""
        return [self.tokens[node] for node in self.path(row)]

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """Children of each row: token -> row."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for row, parent in enumerate(self.parents, start=1):
            children[parent][self.tokens[row]] = row
        return children

    def visible(self) -> npt.NDArray[np.bool_]:
        """Return [rows, rows] the attention mask: each row sees its ancestors and itself."""
        mask = np.eye(len(self.tokens), dtype=np.bool_)
        for row, parent in enumerate(self.parents, start=1):
            mask[row] |= mask[parent]
        return mask

    def walk(self, chosen: Sequence[int]) -> list[int]:
        """Return the accepted rows from the first on: each is its parent's choice.

        Args:
            chosen: [rows] the target's own token after each row.
        """
        rows = [0]
        while (row := self.children[rows[-1]].get(chosen[rows[-1]])) is not None:
            rows.append(row)
        return rows

    def find(self, tokens: Sequence[int]) -> int:
        """Return the row that these tokens lead to, the pending token left out."""
        row = 0
        for token in tokens:
            row = self.children[row][token]
        return row

    def keep(self, rows: Sequence[int]) -> "TokenTree":
        """Return the tree of these rows, in rising order; it must contain each row's parent."""
        places = {row: place for place, row in enumerate(rows)}
        tokens = [self.tokens[row] for row in rows]
        return TokenTree(tokens, [places[self.parents[row - 1]] for row in rows[1:]])

    def __len__(self) -> int:
        return len(self.tokens)


def read_tree(tokens: Tokens, parents: Sequence[int] = ()) -> TokenTree:
    """Build a tree from a message's fields; without parents, a chain.

    Raises:
        ProtocolError: it is not a tree, has equal siblings, or is too large.
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
