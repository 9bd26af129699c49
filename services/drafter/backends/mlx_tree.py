"""One sequence at the MLX backend: the trunk in its KV, and the tree of branches behind it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.decoding.logits_processor import LogitsProcessor, process_rows
from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import Outcome
from services.kv.branching import BranchingState
from services.kv.cache import KVStore
from services.sampling.candidates import Top, best_bonuses

_REMEMBERED = 64
"""How many of the last tokens have their candidates kept."""


@dataclass
class Tree:
    """The branches behind the trunk, kept until the next round adopts one or drops all."""

    pending_at: int
    """Position of the pending token of the round that the tree was grown for."""
    branches: dict[Outcome, int]
    fed: list[Tokens]
    """Per depth, the token of each branch that is in the KV; depth 0 is the bonus token."""
    slots: list[int]
    """First scratch slot of each depth."""
    logits: list[Any]
    """Per depth, [branches, head] logits after it, shaped: numpy's on a CPU, else MLX's."""
    processors: list[LogitsProcessor] = field(default_factory=list)
    """Per branch, after its last fed token, if the request shapes logits."""

    def process_logits(
        self, trunk: LogitsProcessor | None, forks: npt.NDArray[np.int64], tokens: Tokens, rows: Any
    ) -> Any:
        """The next depth's logits as tokens are drawn from them.

        Args:
            trunk: after the trunk's tokens.
            forks: [branches] position of the last trunk token that each branch sees.
            tokens: [branches] what was fed.
            rows: [branches, head] the logits after it.
        """
        if trunk is None:
            return rows
        if not self.processors:
            self.processors = [trunk.branch(int(fork) + 1) for fork in forks]
        pairs = zip(self.processors, tokens, rows, strict=True)
        return np.concatenate([process_rows(s, [token], row[None]) for s, token, row in pairs])


@dataclass
class Trunk:
    """The committed tokens and the chain under verification, without the branches."""

    store: KVStore | BranchingState
    sampling: Sampling
    """The drafter's."""
    tokens: Tokens = field(default_factory=list)
    """As many as the store's length."""
    committed: int = 0
    """How many of them are known to be committed."""
    tops: dict[int, Top] = field(default_factory=dict)
    """Position -> candidates after it (one row), for the recent tokens."""
    tree: Tree | None = None
    processor: LogitsProcessor | None = None
    """After these tokens, if the request shapes logits."""

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens only."""
        self.store.trim(length)
        del self.tokens[length:]
        if self.processor is not None:
            self.processor.rewind(length)
        oldest = length - _REMEMBERED
        self.tops = {p: top for p, top in self.tops.items() if oldest <= p < length}

    def fork(self, chain: Tokens, fan_out: list[int], shift: int) -> list[Outcome]:
        """The outcomes to prepare for: the best bonus tokens at each acceptance length.

        `shift` is `RoundOptions.shift`.
        """
        roots: list[Outcome] = []
        for accepted, wanted in enumerate(fan_out[: len(chain)]):
            position = self.committed + accepted
            best = best_bonuses(self.tops[position], position + 1 + shift, self.sampling)
            rejected = chain[accepted + 1] if accepted + 1 < len(chain) else None
            bonuses = [int(token) for token in best[: wanted + 1] if token != rejected]
            roots += [Outcome(accepted, bonus) for bonus in bonuses[:wanted]]
        return roots


def scratch_positions(forks: npt.NDArray[np.int64], depths: int) -> list[npt.NDArray[np.int64]]:
    """Position of the token in every scratch slot, depth by depth."""
    return [forks + 1 + depth for depth in range(depths)]


def visible(trunk: int, forks: npt.NDArray[np.int64], depths: int) -> npt.NDArray[np.bool_]:
    """[branches, trunk + depths * branches]: the trunk up to the fork, and one's own slots."""
    own = np.tile(np.eye(len(forks), dtype=bool), (1, depths))
    return np.concatenate([np.arange(trunk)[None] <= forks[:, None], own], axis=1)
