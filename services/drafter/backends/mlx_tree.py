"""One sequence of the MLX backend: the trunk in its KV, and the tree of branches after it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from protocol.decoding.logits_processor import LogitsProcessor, process_rows
from protocol.decoding.sampling_params import is_greedy
from protocol.decoding.token_tree import TokenTree
from protocol.decoding.tokens import common_prefix_length
from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import Outcome
from services.engine.batch import Span
from services.kernels.cuda.persistent import Named
from services.kv.branching import BranchingState
from services.kv.cache import KVStore
from services.sampling.candidates import SAMPLED_WIDTH, Top, rank_bonuses

_REMEMBERED = 64
"""Number of last tokens whose candidates are kept."""


class Bud(NamedTuple):
    """A token that is fed to a tree."""

    token: int
    parent: int
    """Index of the tree token that it follows; -1 if it follows the trunk's at `fork`."""
    fork: int
    """Position of the last trunk token that it attends to."""


class DraftedBranch(NamedTuple):
    """A branch that a kernel drafted after the trunk, whose keys and values are not kept."""

    start: int
    """Position of its first token."""
    tokens: Tokens
    named: list[Named]
    """What may follow each of the tokens, but perhaps not the last one."""


class Tree:
    """The tokens fed after the trunk, kept until the next round adopts a path or drops them all.

    They are in scratch slots in the order in which they were fed.

    Args:
        base: position of the pending token of the round that the tree is grown for.
        chain: the trunk from there on.
    """

    def __init__(self, base: int, chain: Tokens) -> None:
        self.base, self.chain = base, list(chain)
        self.fed: list[Bud] = []
        self.lost = self.trunk
        """Slots before this one have been overwritten since, or are the trunk's."""
        self._positions: list[int] = []
        self._children: dict[tuple[int, int], int] = {}
        self._rows: list[tuple[Any, int]] = []
        self._processors: list[LogitsProcessor] = []

    @property
    def trunk(self) -> int:
        """Number of trunk slots, after which the scratch slots start."""
        return self.base + len(self.chain)

    def position(self, bud: Bud) -> int:
        """Return the position of the token in the sequence; its parent must be fed."""
        return 1 + (self._positions[bud.parent] if bud.parent >= 0 else bud.fork)

    def span(self, buds: Sequence[Bud]) -> Span:
        """Return the span of a pass over these tokens; their parents may be among them."""
        first = len(self.fed)
        seen = np.zeros((len(buds), first + len(buds)), np.bool_)
        for row in range(len(buds)):
            at = first + row
            while at >= 0:
                seen[row, at] = True
                at = (self.fed[at] if at < first else buds[at - first]).parent
        forks = np.array([bud.fork for bud in buds])
        trunk = np.arange(self.trunk)
        visible = np.concatenate([trunk[None] <= forks[:, None], seen], axis=1)
        positions = np.array(self._positions + self._place(buds))
        return Span(self.trunk + first, np.concatenate([trunk, positions]), visible)

    def _place(self, buds: Sequence[Bud]) -> list[int]:
        """Return the positions of these tokens; their parents may be among them."""
        first = len(self.fed)
        positions: list[int] = []
        for _, parent, fork in buds:
            before = positions[parent - first] if parent >= first else -1
            if parent < first:
                before = self._positions[parent] if parent >= 0 else fork
            positions.append(1 + before)
        return positions

    def add(self, buds: Sequence[Bud], rows: Any, trunk: LogitsProcessor | None = None) -> Any:
        """Add fed tokens; return the processed logits after them.

        Args:
            buds: in the order of `span`.
            rows: [buds or more, head] logits: numpy's on a CPU or if `trunk` is given, else MLX's.
            trunk: state after the trunk's tokens, if the request processes logits.
        """
        first = len(self.fed)
        self._positions += self._place(buds)
        for index, bud in enumerate(buds, start=first):
            # Below -1 for a parent in the trunk, so that no index of the tree is the same.
            key = bud.parent if bud.parent >= 0 else -2 - bud.fork
            self._children[key, bud.token] = index
        self.fed += buds
        if trunk is not None:
            shaped = [self._process(trunk, bud, rows[i]) for i, bud in enumerate(buds)]
            rows = np.concatenate(shaped)
        self._rows += [(rows, row) for row in range(len(buds))]
        return rows

    def _process(self, trunk: LogitsProcessor, bud: Bud, row: Any) -> Any:
        """Process one row with the state of its ancestors; a first child takes that over."""
        processor = trunk if bud.parent < 0 else self._processors[bud.parent]
        length = self.position(bud)
        if bud.parent < 0 or len(processor) != length:
            processor = processor.branch(length)
        self._processors.append(processor)
        return process_rows(processor, [bud.token], row[None])

    def logits(self, indices: Sequence[int]) -> Any:
        """Return [tokens, head] logits after some of the tokens."""
        parts = [rows[row : row + 1] for rows, row in (self._rows[index] for index in indices)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else mx.concatenate(parts)

    def follow(self, sequence: Tokens, start: int) -> list[int]:
        """Return the indices of the tree's tokens that match the sequence from `start` on.

        Args:
            sequence: starts like the trunk.
            start: a position after the pending token.
        """
        shared = common_prefix_length(self.chain, sequence[self.base :])
        path, key = list[int](), -1 - self.base - shared
        begins_alike = bool(shared) or not self.chain
        for token in sequence[self.base + shared :] if begins_alike else []:
            child = self._children.get((key, token))
            if child is None:
                break
            path.append(child)
            key = child
        path = path[start - self.base - shared :] if start >= self.base + shared else []
        return path if all(self.trunk + index >= self.lost for index in path) else []


@dataclass
class Trunk:
    """The committed tokens and the chain under verification, without the branches."""

    store: KVStore | BranchingState
    sampling: Sampling
    """The drafter's."""
    sequence: Tokens = field(default_factory=list)
    """All committed tokens of the sequence."""
    tokens: Tokens = field(default_factory=list)
    """As many as the store holds."""
    committed: int = 0
    """How many tokens of the trunk are, or will be, committed ones."""
    agreed: int = 0
    """Number of the first `tokens` that are known to be those of the sequence."""
    tops: dict[int, Top] = field(default_factory=dict)
    """Position -> candidates after it (one row), for the recent tokens."""
    tree: Tree | None = None
    branches: list[DraftedBranch] = field(default_factory=list)
    """Those of the kernel's last draft: they name the next bonus tokens."""
    prepares: bool = False
    """True if outcomes are prepared for."""
    processor: LogitsProcessor | None = None
    """State after these tokens, if the request processes logits."""

    def agree(self, desired: Tokens) -> int:
        """Return how many tokens are the desired ones, which start with the committed ones."""
        start = self.agreed
        same = start + common_prefix_length(self.tokens[start:], desired[start:])
        self.agreed = min(same, self.committed)
        return same

    def width(self, needed: int) -> int:
        """Return how many candidates to compute where `needed` are used."""
        return needed if is_greedy(self.sampling) else max(needed, SAMPLED_WIDTH)

    def width_at(self, position: int) -> int:
        """Return how many candidates are held after this token."""
        top = self.tops.get(position)
        return 0 if top is None else top.ids.shape[1]

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens."""
        self.store.trim(length)
        del self.tokens[length:]
        self.agreed = min(self.agreed, length)
        if self.processor is not None:
            self.processor.rewind(length)
        oldest = length - _REMEMBERED
        self.tops = {p: top for p, top in self.tops.items() if oldest <= p < length}
        self.branches = [branch for branch in self.branches if branch.start <= length]

    def fork(
        self, tree: TokenTree, tops: Sequence[Top], fan_out: list[int], shift: int
    ) -> list[Outcome]:
        """Return the outcomes to prepare for, the best bonus tokens after each row.

        Args:
            tree: the one being verified.
            tops: for each row, the candidates after it.
            fan_out: number of outcomes for each row.
            shift: `RoundOptions.shift`.
        """
        roots: list[Outcome] = []
        for row, top in enumerate(tops):
            position = self.committed + tree.depths[row] + 1
            ranked = rank_bonuses(top, position + shift, self.sampling)
            rejected = tree.children[row]
            width = fan_out[row] if row < len(fan_out) else 0
            best = ranked.ids[0, : width + len(rejected)].tolist()
            roots += [Outcome(row, token) for token in best if token not in rejected][:width]
        return roots
