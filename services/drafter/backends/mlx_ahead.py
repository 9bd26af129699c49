"""Drafts on the trunk that start each token's pass before the host has read the one before.

Where a draft has one branch, the next pass has the same position and view of the slots, whichever
token was chosen. So on a GPU it is chosen there and fed to the next pass, which runs while the host
reads the last token, sends it, and builds the pass after. An abandoned pass has written only to a
trunk that knows its tokens.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from protocol.decoding.sampler import Ids
from protocol.decoding.token_tree import TokenTree
from protocol.messages import Tokens
from services.drafter.backends.base import RoundOptions, TreeLayer
from services.drafter.backends.mlx_persistent import PersistentDrafts
from services.drafter.backends.mlx_tree import Trunk
from services.engine.batch import Batch, advance_trunk
from services.engine.runner import ModelRunner
from services.kernels.cuda.sampling.rules import write_rules
from services.kv.cache import KVStore
from services.mlx.launching import launch
from services.sampling.candidates import check_shares
from services.sampling.device import guess


class _Launched(NamedTuple):
    """The token chosen after a running pass."""

    token: mx.array
    """[1] int32."""
    candidates: mx.array
    """As from `sampling.device.guess`."""


class DraftsAhead:
    """Drafts on the trunk, a token ahead of the host, or by a kernel, which also grows branches.

    Args:
        runner: runs the drafter's passes.
        head_ids: token ids of a trimmed head's columns.
        head_size: columns that have a token.
    """

    def __init__(self, runner: ModelRunner, head_ids: Ids | None, head_size: int) -> None:
        self._runner, self._size = runner, head_size
        ids = np.arange(head_size) if head_ids is None else head_ids
        self.ids = mx.array(ids.astype(np.int32))
        """[head] int32."""
        self.persistent: PersistentDrafts | None = None
        """Drafts by a kernel for most trunks, if there is one."""

    def prepare(
        self, trunk: Trunk, tree: TokenTree, fan_out: list[int], depth: int, options: RoundOptions
    ) -> Generator[TreeLayer] | None:
        """Prepare for outcomes like `MlxBackend.prepare` by a kernel; None: none can."""
        if self.persistent is None or options.siblings or not tree.is_chain:
            return None
        return self.persistent.prepare(trunk, tree, fan_out, depth, options)

    def draft(
        self, trunk: Trunk, tokens: Tokens, count: int, options: RoundOptions
    ) -> Generator[TreeLayer]:
        """Feed these to the trunk, cut to their position, and continue after them."""
        persistent = self.persistent
        if persistent and (drafted := persistent.draft(trunk, tokens, count, options)):
            yield from drafted
            return
        store, first = trunk.store, len(trunk.tokens) + len(tokens) + options.shift
        if not isinstance(store, KVStore):
            raise TypeError("a recurrent state does not run ahead of its tokens")
        # A tree's scratch slots lie right after the old trunk: they are overwritten now.
        trunk.tree = None

        def launch_pass(at: int, batch: Batch) -> _Launched:
            [handle] = self._runner.run(batch)
            rules = mx.array(write_rules([first + at], trunk.sampling))
            logits = handle.logits[-1:, : self._size]
            found = guess(logits, self.ids, rules, trunk.sampling)
            launch(*found)
            return _Launched(*found)

        tokens = list(tokens)
        current = launch_pass(0, advance_trunk(store, len(tokens)).over(mx.array(tokens)))
        trunk.tokens += tokens
        for at in range(1, count + 1):
            batch = advance_trunk(store, 1).over(current.token)
            following = launch_pass(at, batch) if at < count else None
            candidates: Any = np.array(current.candidates)[:, 0].tolist()
            check_shares(candidates[1])
            token = int(candidates[0])
            if following is not None:
                trunk.tokens.append(token)
                current = following
            yield TreeLayer([], [token], [candidates[1]])
