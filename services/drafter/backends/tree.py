"""A tree of branches in the scratch slots behind a trunk: where its tokens stand, what they see."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.decoding.logits_processor import LogitsProcessor, process_rows
from protocol.messages import Tokens
from services.drafter.backends.base import Outcome


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
    shapers: list[LogitsProcessor] = field(default_factory=list)
    """Per branch, after its last fed token, if the request shapes logits."""

    def shaped(
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
        if not self.shapers:
            self.shapers = [trunk.branch(int(fork) + 1) for fork in forks]
        pairs = zip(self.shapers, tokens, rows, strict=True)
        return np.concatenate([process_rows(s, [token], row[None]) for s, token, row in pairs])


def scratch_positions(forks: npt.NDArray[np.int64], depths: int) -> list[npt.NDArray[np.int64]]:
    """Position of the token in every scratch slot, depth by depth."""
    return [forks + 1 + depth for depth in range(depths)]


def visible(trunk: int, forks: npt.NDArray[np.int64], depths: int) -> npt.NDArray[np.bool_]:
    """[branches, trunk + depths * branches]: the trunk up to the fork, and one's own slots."""
    own = np.tile(np.eye(len(forks), dtype=bool), (1, depths))
    return np.concatenate([np.arange(trunk)[None] <= forks[:, None], own], axis=1)


def common_length(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences begin with alike."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
