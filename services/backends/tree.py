"""A tree of branches in the scratch slots behind a trunk: where its tokens stand, what they see."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.messages import Tokens
from services.backends.interface import Outcome


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
    """Per depth, [branches, head] logits after it: numpy's on a CPU, else MLX's."""


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
