"""Branches that a kernel drafts in one launch; see `services.kernels.cuda.persistent`.

Used on CUDA for models whose blocks all have our kernels, if it drafts the same tokens at load, and
faster.
"""

import logging
from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from protocol.decoding.token_tree import TokenTree
from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import Outcome, RoundOptions, TreeLayer
from services.drafter.backends.mlx_tree import DraftedBranch, Trunk
from services.engine.batch import round_to_traced
from services.engine.traced_forward import count_slots, has_plain_slots
from services.kernels.cuda.blocks import find_kernels
from services.kernels.cuda.persistent import (
    MOST_DEPTHS,
    MOST_ROWS,
    MOST_RULES,
    DraftCall,
    ModelEnds,
    Named,
    PersistentKernel,
    RunningDraft,
    Unavailable,
    open_box,
)
from services.kernels.cuda.product import Norm
from services.kernels.cuda.sampling.rules import write_rules
from services.kv.cache import KVStore
from services.mlx.patches import Unfit
from services.mlx.selftest import is_faster
from services.runtime.preparation import Steps
from services.sampling.candidates import check_shares
from services.sampling.device import kind_of

_log = logging.getLogger(__name__)

_WHAT = "branches drafted in one launch"
_MOST_MISSING = MOST_ROWS // 2
"""Most tokens of the trunk that are fed in a pass with branches, of which there are then fewer."""
_TRIALS = 8
_FARTHEST = 0.03
"""Largest mean difference of confidences from the usual ones."""
_LEAST_EQUAL = 0.75
"""Least share of equal tokens: of two that are equally likely either may be chosen."""
_GREEDY = Sampling()
_OTHERS = (Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9))
"""One of each other kind, which compiles a kernel of its own."""

Draft = Callable[[int, Sampling], tuple[list[TreeLayer], float]]
"""(trial, sampling) -> the first layer of a draft after its prompt, that of what is prepared for
outcomes, and the seconds of the draft.
"""


class PersistentDrafts:
    """Drafts by the kernel, until the device fails to answer."""

    def __init__(self, kernel: PersistentKernel) -> None:
        self._kernel: PersistentKernel | None = kernel

    def draft(
        self, trunk: Trunk, tokens: Tokens, count: int, options: RoundOptions
    ) -> Generator[TreeLayer] | None:
        """Feed these to the trunk, cut to their position, and continue after them; None: cannot."""
        first = len(trunk.tokens)
        # Where outcomes are prepared for, bonus tokens after the last one are named, too.
        depths = count + (trunk.prepares and count < MOST_DEPTHS)
        call = DraftCall(first, tokens[:-1], tokens[-1:], [first + len(tokens) - 2], depths)
        return self._draft(trunk, call, [], count, options) if self._serves(trunk, call) else None

    def prepare(
        self, trunk: Trunk, tree: TokenTree, fan_out: list[int], depth: int, options: RoundOptions
    ) -> Generator[TreeLayer] | None:
        """Prepare for the outcomes of a chain as a backend does; None: it cannot."""
        desired = trunk.sequence + tree.tokens
        trunk.cut(trunk.agree(desired))
        named = _find_named(trunk, tree.tokens)
        if named is None or len(desired) - len(trunk.tokens) > _MOST_MISSING:
            named = self._name(trunk, desired, options)
        if named is None:
            return None
        first = len(trunk.tokens)
        most = MOST_ROWS - (_MOST_MISSING if first < len(desired) else 0)
        if not (outcomes := _choose_outcomes(tree, named, fan_out)[:most]):
            nothing: list[TreeLayer] = []
            return (layer for layer in nothing)
        roots = [outcome.bonus for outcome in outcomes]
        forks = [trunk.committed + outcome.accepted for outcome in outcomes]
        spread = max(forks) - min(forks)
        depths = min(depth + 1, MOST_DEPTHS, MOST_RULES - spread)
        call = DraftCall(first, desired[first:], roots, forks, depths)
        if not self._serves(trunk, call):
            return None
        return self._draft(trunk, call, outcomes, min(depth, depths), options)

    def _serves(self, trunk: Trunk, call: DraftCall) -> bool:
        store = trunk.store
        if self._kernel is None or not isinstance(store, KVStore) or not store.length:
            return False
        fits = len(call.trunk + call.roots) <= MOST_ROWS and 0 < call.depths <= MOST_DEPTHS
        fits = fits and has_plain_slots(store) and bool(_round_slots(store, call))
        return fits and bool(call.forks) and call.positions <= MOST_RULES

    def _draft(
        self,
        trunk: Trunk,
        call: DraftCall,
        outcomes: list[Outcome],
        depth: int,
        options: RoundOptions,
    ) -> Generator[TreeLayer]:
        """Yield `depth` layers of a call; its further depths only name what may follow."""
        running, read = self._start(trunk, call, options), 0
        try:
            for read in range(1, 1 + call.depths):
                found = self._read(trunk, running, call, read - 1)
                if found is None:
                    return
                if read <= depth:
                    _check(found)
                    tokens = [named.tokens[0] for named in found]
                    yield TreeLayer(outcomes, tokens, [named.confidences[0] for named in found])
        finally:
            # If another request interrupted it, what was found meanwhile is of use.
            for further in range(read, running.stop()) if running is not None else ():
                self._read(trunk, running, call, further)

    def _name(self, trunk: Trunk, desired: Tokens, options: RoundOptions) -> list[Named] | None:
        """Return what may follow each token from the committed ones on, by feeding them."""
        trunk.cut(min(len(trunk.tokens), trunk.committed))
        missing = trunk.committed - len(trunk.tokens)
        found: list[Named] = []
        while fed := desired[len(trunk.tokens) :][:MOST_ROWS]:
            first = len(trunk.tokens)
            call = DraftCall(first, fed, [], range(first - 1, first + len(fed) - 1), 1)
            if not self._serves(trunk, call):
                return None
            named = self._read(trunk, self._start(trunk, call, options), call, 0)
            if named is None:
                return None
            _check(named)
            found += named
        return found[missing:]

    def _start(self, trunk: Trunk, call: DraftCall, options: RoundOptions) -> RunningDraft | None:
        """Begin to draft; return None if the device does not answer any more."""
        kernel, store = self._kernel, trunk.store
        if kernel is None or not isinstance(store, KVStore):
            raise TypeError("this trunk has no kernel")
        store.widen(_round_slots(store, call))
        store.own()
        position = call.origin + options.shift
        rules = write_rules(range(position, position + call.positions), trunk.sampling)
        # A tree's scratch slots lie right after the old trunk: they are overwritten now.
        trunk.tree = None
        try:
            return kernel.start(store.buffers, call, rules, kind_of(trunk.sampling))
        except Unavailable as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Unavailable) -> None:
        _log.warning("%s: not used any more: %s", _WHAT, error)
        self._kernel = None  # what it has found is in the trunk

    def _read(
        self, trunk: Trunk, running: RunningDraft | None, call: DraftCall, depth: int
    ) -> list[Named] | None:
        """Return what is named after each branch; None if the device does not answer any more."""
        if self._kernel is None or running is None:
            return None
        try:
            found = running.read(depth, len(call.roots) or len(call.trunk))
        except Unavailable as error:
            self._give_up(error)
            return None
        fed = call.trunk if depth == 0 else []
        if depth == 0:
            starts = [(fork + 1, root) for fork, root in zip(call.forks, call.roots, strict=False)]
            trunk.branches = [DraftedBranch(start, [root], []) for start, root in starts]
        if call.continues_trunk:
            fed = [*fed, trunk.branches[0].tokens[depth]]
        trunk.store.chain(len(fed))
        trunk.tokens += fed
        for branch, named in zip(trunk.branches, found, strict=False):
            branch.tokens.append(named.tokens[0])
            branch.named.append(named)
        return found


Use = Callable[[PersistentDrafts | None], None]
"""Makes the drafter use this kernel, or none."""


def _check(found: list[Named]) -> None:
    check_shares(np.array([named.confidences[0] for named in found]))


def _find_named(trunk: Trunk, tokens: Tokens) -> list[Named] | None:
    """Return what may follow each of these tokens after the committed ones, if it is known."""
    for start, drafted, named in trunk.branches:
        is_same = start == trunk.committed and drafted[: len(tokens)] == tokens
        if is_same and len(named) >= len(tokens):
            return named[: len(tokens)]
    return None


def _choose_outcomes(tree: TokenTree, named: list[Named], fan_out: list[int]) -> list[Outcome]:
    """Return the requested outcomes, the most likely first."""
    chances: list[tuple[float, Outcome]] = []
    reached = 1.0
    for row, (tokens, shares) in enumerate(named):
        rejected = tree.children[row]
        pairs = zip(tokens, shares, strict=True)
        others = [(token, share) for token, share in pairs if share > 0.0 and token not in rejected]
        width = fan_out[row] if row < len(fan_out) else 0
        chances += [(reached * share, Outcome(row, token)) for token, share in others[:width]]
        reached *= max(0.0, 1.0 - sum(share for _, share in others))
    return [outcome for _, outcome in sorted(chances, key=lambda chance: -chance[0])]


def try_persistent(model: Any, ids: mx.array, use: Use, draft: Draft) -> Steps[None]:
    """Use the kernel if it is right and faster.

    Args:
        model: an mlx-lm model whose blocks may have kernels.
        ids: [columns] int32, the token id of each column of its logits.
        use: makes the drafter use this kernel, or none.
        draft: drafts after a trial prompt, and prepares for the outcomes.
    """
    try:
        drafts = PersistentDrafts(_open(model, ids))
        usual = [draft(trial, _GREEDY)[0] for trial in range(_TRIALS)]
        yield
        ours = [_draft_by(drafts, use, draft, trial)[0] for trial in range(_TRIALS)]
        yield
        if not _agree(usual, ours):
            return
        times = []
        for chosen in (None, drafts):
            times.append(min(_draft_by(chosen, use, draft, trial)[1] for trial in range(_TRIALS)))
            yield
        if not is_faster(_WHAT, *times):
            return
        for sampling in _OTHERS:
            _draft_by(drafts, use, draft, 0, sampling)
            yield
        use(drafts)
    except (Unfit, OSError) as reason:
        _log.info("%s: not used: %s", _WHAT, reason)
    # Faults of a device or a driver must show here, and not in an answer.
    except Exception as error:  # noqa: BLE001
        _log.warning("%s: not used: %s", _WHAT, error)


def _draft_by(
    drafts: PersistentDrafts | None,
    use: Use,
    draft: Draft,
    trial: int,
    sampling: Sampling = _GREEDY,
) -> tuple[list[TreeLayer], float]:
    """Draft with this kernel, or none; requests in between are served without."""
    use(drafts)
    try:
        return draft(trial, sampling)
    finally:
        use(None)


def _list_firsts(draft: list[TreeLayer]) -> dict[tuple[int, Outcome | None], tuple[int, float]]:
    """Return token and confidence of each branch's first token, by layer and branch."""
    firsts: dict[tuple[int, Outcome | None], tuple[int, float]] = {}
    for at, layer in enumerate(draft):
        branches: list[Outcome | None] = [*layer.outcomes] or [None]
        pairs = zip(layer.tokens, layer.confidences, strict=True)
        firsts |= zip([(at, branch) for branch in branches], pairs, strict=True)
    return firsts


def _agree(usual: list[list[TreeLayer]], ours: list[list[TreeLayer]]) -> bool:
    """Return True if first tokens are mostly the same, with the same confidence."""
    firsts = [map(_list_firsts, pair) for pair in zip(usual, ours, strict=True)]
    pairs = [(first, mine.get(at)) for theirs, mine in firsts for at, first in theirs.items()]
    same = [(first[1], mine[1]) for first, mine in pairs if mine and first[0] == mine[0]]
    distance = sum(abs(share - other) for share, other in same) / max(1, len(same))
    right = len(same) >= max(1.0, _LEAST_EQUAL * len(pairs)) and distance <= _FARTHEST
    if not right:
        _log.warning(
            "%s: %d of %d tokens are the usual ones, with confidences %.2g from theirs: not used",
            _WHAT, len(same), len(pairs), distance,
        )  # fmt: skip
    return right


def _open(model: Any, ids: mx.array) -> PersistentKernel:
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
    return PersistentKernel(blocks, ends, open_box())


def _round_slots(store: KVStore, call: DraftCall) -> int:
    """Return the slots of buffers with room for a call; 0 if there are none."""
    return round_to_traced(max(count_slots(store), call.slots))
