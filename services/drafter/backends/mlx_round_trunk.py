"""One sequence of a backend that prelaunches rounds: tokens in scratch slots, and their rankings.

Until a round has run, the tokens that it sees stay where an earlier one has put them. What may
follow a token was chosen on the device when the token was fed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from protocol.decoding.sampler import Floats, Ids
from protocol.decoding.token_tree import TokenTree
from protocol.messages import Tokens
from services.drafter.backends.base import Outcome
from services.drafter.backends.mlx_tree import Bud, Tree, Trunk
from services.sampling.candidates import SAMPLED_WIDTH, check_shares, rank_bonuses

_REMEMBERED = 64
"""Number of last tokens whose rankings are kept."""


class Choices:
    """The choices of a pass after each of its rows, on the device until they are read.

    Args:
        read: returns them as `sampling.device.guess` does, on the host.
    """

    def __init__(self, read: Callable[[], Floats]) -> None:
        self._read = read

    @cached_property
    def ids_and_shares(self) -> Floats:
        """[2, rows, width] on the host; waits."""
        found = self._read()
        check_shares(found[1])
        return found


class Ranking(NamedTuple):
    """The choices after one token, best first, under the noise of the token to be chosen."""

    choices: Choices
    row: int

    @property
    def ids(self) -> Ids:
        """[width] token ids; waits."""
        ids: Ids = self.choices.ids_and_shares[0, self.row].astype(np.int64)
        return ids


class RoundTree(Tree):
    """A tree whose depths are the passes of a round, in any slots."""

    def __init__(self, base: int, chain: Tokens) -> None:
        super().__init__(base, chain)
        self.slots: list[int] = []
        """Of each fed token."""
        self.rankings: list[Ranking] = []
        """The choices after each."""

    def slot(self, index: int) -> int:
        """Return the slot of a fed token."""
        return self.slots[index]

    def add_pass(self, buds: Sequence[Bud], choices: Choices, start: int) -> None:
        """Add the tokens of a pass, in slots from `start` on."""
        self.add(buds, None)
        self.slots += range(start, start + len(buds))
        self.rankings += [Ranking(choices, row) for row in range(len(buds))]


@dataclass
class RoundTrunk(Trunk):
    """The committed tokens and the chain under verification, some of them in scratch slots."""

    rankings: dict[int, Ranking] = field(default_factory=dict)
    """Position -> choices after it, in place of candidates."""
    scattered: list[int] = field(default_factory=list)
    """Slots of the last tokens, which still have to be moved behind the others."""

    def width_at(self, position: int) -> int:
        """Return how many candidates are held after this token; a ranking suffices."""
        return SAMPLED_WIDTH if position in self.rankings else super().width_at(position)

    def slot_of(self, position: int) -> int:
        """Return the slot of a token that it holds."""
        behind = position - self.store.length
        return position if behind < 0 else self.scattered[behind]

    def settle(self) -> None:
        """Move all tokens to the slots of their positions."""
        scattered, self.scattered = self.scattered, []
        if scattered:
            self.store.move(scattered)
        if self.tree is not None:
            self.tree.lost = max(self.tree.lost, self.store.length)

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens."""
        del self.scattered[max(0, length - self.store.length) :]
        if self.scattered:
            del self.tokens[length:]
            self.agreed = min(self.agreed, length)
        else:
            super().cut(length)
        recent = range(length - _REMEMBERED, length)
        self.rankings = {at: one for at, one in self.rankings.items() if at in recent}

    def forget_rounds(self) -> None:
        """Drop all rankings: passes that are awaited need candidates."""
        self.rankings.clear()
        if isinstance(self.tree, RoundTree):
            self.tree = None

    def append(self, tokens: Tokens, choices: Choices, start: int) -> None:
        """Append tokens that are in the slots from `start` on, and the choices after each."""
        length = len(self.tokens)
        self.tokens += tokens
        self.scattered += range(start, start + len(tokens))
        self.rankings |= {length + row: Ranking(choices, row) for row in range(len(tokens))}

    def find_outcomes(self, tree: TokenTree, fan_out: Sequence[int], shift: int) -> list[Outcome]:
        """Return the outcomes of a chain, which is its last tokens, as `fork` does.

        There are fewer if fewer are ranked.
        """
        roots: list[Outcome] = []
        for row, width in enumerate(fan_out):
            position = self.committed + row
            if (ranking := self.rankings.get(position)) is not None:
                ids = ranking.ids
            else:
                top = self.tops[position]
                ids = rank_bonuses(top, position + 1 + shift, self.sampling).ids[0]
            likely = [token for token in ids.tolist() if token not in tree.children[row]]
            roots += [Outcome(row, token) for token in likely[:width]]
        return roots
