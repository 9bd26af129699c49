"""Chains that a kernel drafts in one launch; see `services.kernels.cuda.persistent`.

Used on CUDA for models whose blocks all have our kernels, if it drafts the same tokens at load, and
faster.
"""

import logging
from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import RoundOptions, TreeLayer
from services.drafter.backends.mlx_tree import Trunk
from services.engine.batch import round_to_traced
from services.kernels.cuda.blocks import find_kernels
from services.kernels.cuda.persistent import (
    MOST_DEPTHS,
    MOST_ROWS,
    ModelEnds,
    PersistentChain,
    Unavailable,
    open_box,
)
from services.kernels.cuda.product import Norm
from services.kernels.cuda.sampling.rules import write_rules
from services.kv.cache import KVStore, SlotCache
from services.mlx.patches import Unfit
from services.mlx.selftest import is_faster
from services.runtime.preparation import Steps
from services.sampling.candidates import check_shares
from services.sampling.device import kind_of

_log = logging.getLogger(__name__)

_WHAT = "chains drafted in one launch"
_TRIALS = 8
_FARTHEST = 0.05
"""Largest difference of a confidence from the usual one."""
_LEAST_EQUAL = 0.75
"""Least share of equal first tokens: of two that are equally likely either may be chosen."""
_SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9))
"""One of each kind, which compiles a kernel of its own."""

Draft = Callable[[int, Sampling], tuple[list[TreeLayer], float]]
"""(trial, sampling) -> the layers of a draft after its prompt, and its seconds."""


class Chains:
    """Drafts on the trunk by the kernel, until the device fails to answer."""

    def __init__(self, chain: PersistentChain) -> None:
        self._chain: PersistentChain | None = chain

    def serves(self, store: KVStore, fed: int, count: int) -> bool:
        """Return True if it drafts `count` tokens after feeding `fed`."""
        plain = all(type(cache) is SlotCache and cache.window is None for cache in store.caches)
        fits = fed <= MOST_ROWS and count <= MOST_DEPTHS and _count_slots(store, fed + count)
        return bool(self._chain is not None and fits and plain and store.length)

    def draft(
        self, trunk: Trunk, tokens: Tokens, count: int, options: RoundOptions
    ) -> Generator[TreeLayer]:
        """Feed these to the trunk, cut to their position, and continue after them."""
        store, chain, first = trunk.store, self._chain, len(trunk.tokens)
        if chain is None or not isinstance(store, KVStore):
            raise TypeError("this trunk has no kernel")
        store.widen(_count_slots(store, len(tokens) + count))
        store.own()
        after = first + len(tokens) + options.shift
        rules = write_rules(range(after, after + count), trunk.sampling)
        # A tree's scratch slots lie right after the old trunk: they are overwritten now.
        trunk.tree = None
        drafted = chain.draft(store.buffers, first, tokens, rules, kind_of(trunk.sampling))
        try:
            for token, confidence in drafted:
                check_shares(np.array([confidence]))
                store.chain(len(tokens))
                trunk.tokens += tokens
                tokens = [token]
                yield TreeLayer([], tokens, [confidence])
        except Unavailable as error:
            _log.warning("%s: not used any more: %s", _WHAT, error)
            self._chain = None  # what it has told is in the trunk


def try_chains(
    model: Any, ids: mx.array, use: Callable[[Chains | None], None], draft: Draft
) -> Steps[None]:
    """Use chains of one launch if they are right and faster.

    Args:
        model: an mlx-lm model whose blocks may have kernels.
        ids: [columns] int32, the token id of each column of its logits.
        use: makes the drafter use these chains, or none.
        draft: drafts after a trial prompt.
    """
    try:
        chains = Chains(_open(model, ids))
        usual = [draft(trial, _SAMPLINGS[0])[0] for trial in range(_TRIALS)]
        yield
        use(chains)
        ours = [draft(trial, _SAMPLINGS[0])[0] for trial in range(_TRIALS)]
        yield
        use(None)
        if not _agree(usual, ours):
            return
        times = []
        for chosen in (None, chains):
            use(chosen)
            times.append(min(draft(trial, _SAMPLINGS[0])[1] for trial in range(_TRIALS)))
            yield
        if not is_faster(_WHAT, *times):
            use(None)
            return
        for sampling in _SAMPLINGS[1:]:
            draft(0, sampling)
            yield
    except (Unfit, OSError) as reason:
        _log.info("%s: not used: %s", _WHAT, reason)
    # Faults of a device or a driver must show here, and not in an answer.
    except Exception as error:  # noqa: BLE001
        use(None)
        _log.warning("%s: not used: %s", _WHAT, error)


def _agree(usual: list[list[TreeLayer]], ours: list[list[TreeLayer]]) -> bool:
    """Return True if the first tokens are mostly the same, with the same confidence."""
    pairs = [(layers[0], others[0]) for layers, others in zip(usual, ours, strict=True)]
    same = [(layer, other) for layer, other in pairs if layer.tokens == other.tokens]
    distance = max((abs(a.confidences[0] - b.confidences[0]) for a, b in same), default=1.0)
    right = len(same) >= _LEAST_EQUAL * len(pairs) and distance <= _FARTHEST
    if not right:
        _log.warning(
            "%s: %d of %d tokens are the usual ones, with confidences %.2g from theirs: not used",
            _WHAT, len(same), len(pairs), distance,
        )  # fmt: skip
    return right


def _open(model: Any, ids: mx.array) -> PersistentChain:
    """Return the kernel of a model; raises Unfit or OSError if there is none."""
    blocks = find_kernels(model)
    body: Any = getattr(model, "model", None)
    if not blocks or type(body.norm) is not nn.RMSNorm:
        raise Unfit("its blocks have no kernels")
    embedding = getattr(body.embed_tokens, "looked_up", body.embed_tokens)
    if "lm_head" in model:
        head = model.lm_head.weight
    else:
        head = getattr(body.embed_tokens, "head", embedding.weight)
    if "scales" in embedding or head.dtype != blocks[0].weight.dtype:
        raise Unfit("its embedding or head has other weights than its blocks")
    table = embedding.weight.astype(head.dtype)
    ends = ModelEnds(table, Norm(body.norm.weight, body.norm.eps), head, ids)
    return PersistentChain(blocks, ends, open_box())


def _count_slots(store: KVStore, more: int) -> int:
    """Return the slots of buffers with room for `more` tokens; 0 if there are none."""
    keys = store.caches[0].keys
    return round_to_traced(max(0 if keys is None else keys.shape[2], store.length + more))
