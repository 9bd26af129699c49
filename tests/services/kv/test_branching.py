"""Recurrent states at a drafter: batches of branches, adoption, and going back."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.errors import ModelError
from services.engine.batch import Span
from services.kv.branching import BranchingState
from services.kv.rewinding import find_branching
from services.mlx.loader import load
from services.mlx.rope import allow_branches
from tests.support.reference import reference, tiny_folder

PROMPT = [5, 9, 200, 41, 7]


class Line:
    """A trunk, and its logits beside those of mlx-lm for the same tokens."""

    def __init__(self, family: str) -> None:
        self.model: Any = load(tiny_folder(family)).module
        allow_branches(self.model)
        self.reference = reference(family)
        self.state: BranchingState = find_branching(self.model, bucketed=False)()
        self.tokens: list[int] = []

    def feed(self, tokens: list[int]) -> None:
        """Append to the trunk; the logits are those of the text."""
        self.state.chain(len(tokens))
        logits = self.model(mx.array([tokens]), cache=self.state.caches)[0]
        self.tokens += tokens
        self.check(logits[-1], self.tokens)

    def grow(self, forks: Sequence[int], depths: list[list[int]]) -> None:
        """A tree whose branches begin after so many tokens; each depth has a token a branch."""
        trunk, at = len(self.tokens), np.array(forks)
        eye = np.eye(len(forks), dtype=bool)
        for depth, tokens in enumerate(depths):
            known = np.arange(trunk)[None] < at[:, None]
            visible = np.concatenate([known, np.tile(eye, (1, depth + 1))], axis=1)
            positions = [np.arange(trunk), *(at + d for d in range(depth + 1))]
            start = trunk + depth * len(forks)
            self.state.place(Span(start, np.concatenate(positions), visible))
            batch = mx.array(tokens)[:, None]
            logits = self.model(batch, cache=self.state.caches)[:, 0]
            for branch, fork in enumerate(forks):
                path = [d[branch] for d in depths[: depth + 1]]
                self.check(logits[branch], [*self.tokens[:fork], *path])

    def check(self, row: mx.array, text: list[int]) -> None:
        [expected] = self.reference.rows([text])
        np.testing.assert_allclose(np.array(row), expected[-1], atol=2e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granite4"])
def test_a_branch_has_a_state_of_its_own(family: str) -> None:
    """Wherever it forks, and however deep; the one that is adopted becomes the trunk."""
    line = Line(family)
    line.feed(PROMPT)
    line.feed([30, 31, 32])
    line.grow([6, 7, 8, 8], [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    line.state.trim(7)
    del line.tokens[7:]
    line.state.move([8 + 1, 8 + 4 + 1])
    line.tokens += [2, 6]
    line.feed([50])
    line.state.trim(8)
    del line.tokens[8:]
    line.feed([60, 61])
    line.grow([9, 10], [[1, 2]])


def test_old_states_are_not_held() -> None:
    """A long prompt leaves one; what is older than the last passes cannot be gone back to."""
    line = Line("lfm2")
    for _ in range(4):
        line.feed([7] * 80)
    line.feed([1, 2, 3])
    assert [line.state.resumable(length) for length in (323, 322, 320, 319)] == [323, 322, 320, 0]
    for _ in range(20):
        line.feed([4, 5])
    assert line.state.resumable(340) == 0
    fork = line.state.fork(362)
    assert fork.length == 362
    with pytest.raises(ValueError, match="after 340 tokens is no longer held"):
        line.state.fork(340)


@pytest.mark.parametrize("family", ["jamba", "rwkv7", "hybrid"])
def test_other_recurrences_do_not_draft(family: str) -> None:
    with pytest.raises(ModelError, match=r"verif(y|ies) drafts, but cannot draft"):
        find_branching(load(tiny_folder(family)).module, bucketed=False)
