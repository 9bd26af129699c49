"""Depths that start before the last one has been read.

Where every branch continues with exactly one token, the next pass has the same positions and the
same view of the slots, whichever tokens these are. So on a GPU they are chosen there and fed to the
next pass, which runs while the host reads the last depth, sends it, and builds the one after. An
abandoned pass has written only to scratch slots, or to a trunk that knows its tokens.
"""

from collections.abc import Generator
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.sampler import Ids, has_filter
from protocol.decoding.sampling_params import is_greedy
from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import Outcome, RoundOptions, TreeLayer
from services.drafter.backends.growth import Tip
from services.drafter.backends.mlx_chain import Chains
from services.drafter.backends.mlx_rows import TracedPasses
from services.drafter.backends.mlx_tree import Bud, Trunk
from services.engine.batch import Batch, advance_branches, advance_trunk
from services.engine.pass_handle import PassHandle
from services.engine.runner import ModelRunner
from services.kernels.cuda.sampling.rules import write_rules
from services.kv.cache import KVStore
from services.mlx.launching import launch
from services.runtime.preparation import Steps
from services.sampling.candidates import check_shares
from services.sampling.device import guess


class _Launched(NamedTuple):
    """A running pass, and the tokens chosen after it."""

    tokens: mx.array
    """[rows] int32, the argmax after each row."""
    candidates: mx.array
    """As from `sampling.device.guess`."""
    logits: mx.array
    """[rows, head]."""
    following: Batch | None
    """As for `PassHandle`."""


class DepthsAhead:
    """Grows branches and drafts on the trunk, a depth ahead of the host.

    Args:
        runner: runs the drafter's passes, those that pay from traces.
        head_ids: token ids of a trimmed head's columns.
        head_size: columns that have a token.
    """

    def __init__(self, runner: ModelRunner, head_ids: Ids | None, head_size: int) -> None:
        self._runner, self._size = runner, head_size
        ids = np.arange(head_size) if head_ids is None else head_ids
        self.ids = mx.array(ids.astype(np.int32))
        """[head] int32."""
        self.traced: TracedPasses | None = None
        """Passes of the shapes that are replayed."""
        self.chains: Chains | None = None
        """Drafts on the trunk where a kernel drafts them."""

    def trace(self, store: KVStore) -> Steps[None]:
        """Test which passes are faster when replayed; `store` is an empty one."""
        traced = TracedPasses(self._runner.model, self._size, self.ids)
        yield from traced.prepare(lambda: store.fork(0))
        self.traced, self._runner.traced = traced, traced.forward

    def grow(
        self,
        trunk: Trunk,
        roots: list[Outcome],
        tips: list[Tip],
        depth: int,
        options: RoundOptions,
    ) -> Generator[TreeLayer]:
        """Grow branches like `MlxBackend._grow`; siblings do not continue."""
        store, tree, count = _slots(trunk), trunk.tree, len(tips)
        if tree is None or not count or not depth:
            return
        buds = _to_buds(tips)
        span = tree.span(buds)
        traced = self.traced
        # One pass more than depths, if there is room.
        more = traced is not None and traced.forward.serves(store, span, depth=depth + 1)
        batch = advance_branches(store, span, depth + more)
        handle = self._run(batch.over(mx.array([bud.token for bud in buds], mx.int32)))
        positions = span.own_positions + 1 + options.shift
        rules = _find_rules(trunk.sampling, positions, depth, len(handle.logits))
        choose = partial(self._choose, 1 + options.siblings, trunk.sampling)
        current = choose(rules[0], handle)
        tree.add(buds, current.logits)
        for at in range(1, depth + 1):
            following = choose(rules[at], self._run(_follow(current))) if at < depth else None
            first, candidates = len(tree.fed) - count, np.array(current.candidates)[:, :count]
            layer, tips = _read_layer(roots, tips, candidates, first, options)
            if following is not None:
                current = following
                tree.add(_to_buds(tips), current.logits)
            yield layer
        if (batch := _follow(current)).depth:
            # The last tokens, too, since that is cheap: a hit then has the whole next chain.
            logits = self._run(batch).logits
            launch(logits)
            tree.add(_to_buds(tips), logits)

    def draft(
        self, trunk: Trunk, tokens: Tokens, count: int, options: RoundOptions
    ) -> Generator[TreeLayer]:
        """Feed these to the trunk, cut to their position, and continue after them."""
        if self.chains is not None and self.chains.serves(_slots(trunk), len(tokens), count):
            yield from self.chains.draft(trunk, tokens, count, options)
            return
        store, first = _slots(trunk), len(trunk.tokens) + len(tokens) + options.shift
        rules = _find_rules(trunk.sampling, np.array([first]), count, 1)
        # A tree's scratch slots lie right after the old trunk: they are overwritten now.
        trunk.tree = None

        def launch_depth(at: int, batch: Batch) -> _Launched:
            handle = self._run(batch)
            handle.logits = handle.logits[-1:]
            return self._choose(1, trunk.sampling, rules[at], handle)

        batch = advance_trunk(store, len(tokens), count)
        current = launch_depth(0, batch.over(mx.array(tokens, mx.int32)))
        trunk.tokens += tokens
        if len(tokens) > 1:
            current = current._replace(following=advance_trunk(store, 1, count - 1))
        for at in range(1, count + 1):
            following = launch_depth(at, _follow(current)) if at < count else None
            candidates: Any = np.array(current.candidates)[:, 0, 0].tolist()
            check_shares(candidates[1])
            token = int(candidates[0])
            if following is not None:
                trunk.tokens.append(token)
                current = following
            yield TreeLayer([], [token], [candidates[1]])

    def _run(self, batch: Batch) -> PassHandle:
        [handle] = self._runner.run(batch)
        handle.logits = handle.logits[:, : self._size]
        return handle

    def _choose(
        self, width: int, sampling: Sampling, rules: mx.array, handle: PassHandle
    ) -> _Launched:
        logits, following = handle.logits, handle.following
        is_traced = following is not None and following.place
        if is_traced and self.traced and not has_filter(sampling):
            drawn = not is_greedy(sampling)
            tokens, candidates = self.traced.choose(logits, width, rules, drawn=drawn)
        else:
            tokens, candidates = guess(logits, width, self.ids, rules, sampling)
        launch(tokens, candidates)
        return _Launched(tokens, candidates, logits, following)


def _follow(current: _Launched) -> Batch:
    """Return the pass over the tokens chosen after this one."""
    if current.following is None:
        raise ValueError("no pass continues these rows")
    return current.following.over(current.tokens)


def _to_buds(tips: list[Tip]) -> list[Bud]:
    return [Bud(tip.token, tip.parent, tip.fork) for tip in tips]


def _slots(trunk: Trunk) -> KVStore:
    if not isinstance(trunk.store, KVStore):
        raise TypeError("a recurrent state does not run ahead of its tokens")
    return trunk.store


def _read_layer(
    roots: list[Outcome],
    tips: list[Tip],
    candidates: npt.NDArray[np.float32],
    first: int,
    options: RoundOptions,
) -> tuple[TreeLayer, list[Tip]]:
    """Return the tokens chosen after these tips, and the next tips; see `grow_layer`.

    It uses arrays, since host time dominates the cost of a depth.
    """
    tokens, sure = candidates[0].astype(np.int64), candidates[1]
    check_shares(sure)
    named = sure > 0.0
    named[:, 0] = True
    rows = np.nonzero(named)[0]
    parents = np.array([tip.place for tip in tips])[rows].tolist() if options.siblings else []
    layer = TreeLayer(roots, tokens[named].tolist(), sure[named].tolist(), parents=parents)
    places: list[int] = np.searchsorted(rows, np.arange(len(tips))).tolist()
    best: list[int] = tokens[:, 0].tolist()
    after = [
        Tip(token, fed, tip.fork, place)
        for fed, (tip, token, place) in enumerate(zip(tips, best, places, strict=True), start=first)
    ]
    return layer, after


def _find_rules(
    sampling: Sampling, positions: npt.NDArray[np.int64], depth: int, count: int
) -> mx.array:
    """Return [depth, count, WORDS] for each depth's tokens; the first is at positions [rows]."""
    places = np.zeros((depth, count), np.int64)
    places[:, : len(positions)] = positions + np.arange(depth)[:, None]
    return mx.array(write_rules(places, sampling))
