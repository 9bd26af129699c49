"""What a target can do, as found by tests: as a whole, or spread over ranks."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.errors import ModelError
from protocol.messages import Tokens
from services.engine.batch import Batch, BatchPart
from services.engine.forward_trial import trace_if_faster
from services.engine.packing import enable_packing
from services.engine.runner import ModelRunner
from services.engine.slot_table import SlotTable
from services.engine.trace import FeatureReader
from services.engine.traced_forward import TracedForward
from services.kernels.cpu.decoder import fill_only, kernel_of
from services.kernels.cpu.equip import equip
from services.kernels.register import kernels
from services.kv.cache import KVStore
from services.kv.recording import record_pass
from services.kv.rewinding import StateFactory, find_rewinding
from services.kv.state import SequenceState
from services.mlx.fused_linear import fuse_linears
from services.mlx.loader import LoadedModel, windows_of
from services.mlx.rope import allow_branches, use_tables
from services.mlx.selftest import is_close, measure_distance
from services.runtime.preparation import Steps, run_all

if TYPE_CHECKING:
    from services.mlx.taps import TrialPasses
    from services.ranks.group import RankGroup

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TargetModel:
    """The functions and abilities of a target."""

    verify: Callable[..., Any]
    """(tokens[1, n], cache=caches) -> logits[1, n, vocabulary]"""
    prefill: Callable[..., Any]
    """Like `verify` if only the KV is needed; its result must not be used."""
    states: StateFactory
    """Creates the states of sequences, for the layers in this process."""
    bucketed: bool
    """As for `KVStore`."""
    pipelines: bool
    """True if a pass can start before its token has been read."""
    shares_passes: bool = False
    """True if several sequences can share a pass."""
    takes_trees: bool = False
    """True if a pass can be over a tree of tokens."""
    table: SlotTable | None = None
    """Slot table for shared passes in which one attention kernel serves all sequences."""
    traced: TracedForward | None = None
    """Traced passes on a GPU, which would otherwise wait for this process to build them."""
    trial: "TrialPasses | None" = None
    """How a rank's part tests if a drafter can read it."""

    @property
    def shares_prompts(self) -> bool:
        """True if the chunks of several prompts may share a pass.

        Products of many rows round differently in a batch, and a resumed recurrent prompt must have
        the bits of a fresh one.
        """
        return self.shares_passes and self.states.way != "replay"

    def read(self, reader: FeatureReader, *, unless: "TargetModel | None" = None) -> None:
        """Include this reader's present features in replayed passes, but for `unless`'s."""
        done = (None,) if unless is None else (None, unless.traced, unless.table)
        for traced in (self.traced, self.table):
            if traced is not None and traced not in done:
                traced.read(reader)

    def run_alone(self, tokens: mx.array) -> mx.array:
        """Return logits [1, n, vocabulary] of tokens [1, n], without a sequence."""
        state = self.states.make()
        state.append(tokens.shape[1], whole=True)
        logits: mx.array = self.verify(tokens, cache=state.caches)
        return logits


class OpenTarget(NamedTuple):
    """A target that is loaded."""

    model: LoadedModel
    """With ranks, rank 0's part only."""
    target: TargetModel | None
    """None if the whole model is here, and still to be prepared."""
    compute_unit: str
    ranks: "RankGroup | None"


Improvement = Callable[[TargetModel], Steps[TargetModel]]
"""Tests what a target can do besides plain passes, and returns it with that."""


def prepare(module: Any, *, is_part: bool = False, may_share_passes: bool = True) -> TargetModel:
    """Prepare an mlx-lm model for the verifier, all at once.

    Args:
        module: the model.
        is_part: True if it is one rank's part, which computes in step with the others.
        may_share_passes: True to test if several sequences can share a pass.
    """
    target = prepare_plain(module, is_part=is_part)
    for name, improve in list_improvements(target):
        is_wanted = may_share_passes if name == SHARED else not (is_part and name in _WHOLE)
        target = run_all(improve(target)) if is_wanted else target
    return target


def prepare_plain(module: Any, *, is_part: bool = False) -> TargetModel:
    """Prepare an mlx-lm model for plain passes; changes its layers where that is faster.

    Arguments as for `prepare`.
    """
    on_gpu, bucketed = kernels().on_gpu, kernels().plans_shapes
    if not on_gpu and kernel_of(module) is None and (is_part or not equip(module)):
        use_tables(module)
    if bucketed:
        fuse_linears(module)
    # Its passes have the same bits for a row in any company, by construction.
    by_kernel = kernel_of(module) is not None
    states = (
        _find_slots(module, bucketed=bucketed)
        if is_part
        else find_rewinding(module, bucketed=bucketed, whole=by_kernel)
    )
    if not is_part:  # in a pipeline of ranks, attention must stay in the graph
        # Attention by our kernels from the first pass on, so that later ones have the same bits.
        with contextlib.suppress(ModelError):
            enable_packing(module)
    return TargetModel(
        verify=module,
        prefill=fill_only(module),
        states=states,
        bucketed=bucketed,
        # On a CPU the pass and this process would compete for cores.
        pipelines=on_gpu,
        shares_passes=by_kernel,
        takes_trees=by_kernel,
    )


SHARED = "shared passes"
_WHOLE = ("trees", "a table", "traces")
"""What a rank's part does without."""


def list_improvements(target: TargetModel) -> Iterator[tuple[str, Improvement]]:
    """Yield what can be tested of this target on this device by name, in order."""
    if kernels().equip is not None:
        yield "kernels", _try_kernels
    if not target.shares_passes:
        yield SHARED, _try_sharing
    if kernels().attend_table is not None:
        yield "a table", _try_table
    if not target.takes_trees:
        yield "trees", _try_trees
    if kernels().on_gpu:
        yield "traces", _try_traces


def _try_kernels(target: TargetModel) -> Steps[TargetModel]:
    if (equip_traces := kernels().equip) is not None:
        yield from equip_traces(target.verify)
    return target


def _try_sharing(target: TargetModel) -> Steps[TargetModel]:
    states = target.states
    shares = states.rewinds and (yield from supports_packing(target.verify, states.make))
    return replace(target, shares_passes=shares)


def _try_table(target: TargetModel) -> Steps[TargetModel]:
    """Find a table for shared passes, if the model and the kernel support one."""
    attend_table = kernels().attend_table
    if not target.shares_passes or attend_table is None:
        return target
    table = yield from find_table(target.verify, target.states.make, attend_table)
    if table is not None:
        yield from table.warm_up(target.verify, target.states.make)
        table.drop_if_empty()
    return replace(target, table=table)


def _try_trees(target: TargetModel) -> Steps[TargetModel]:
    states = target.states
    takes = states.rewinds and (yield from supports_trees(target.verify, states.make))
    return replace(target, takes_trees=takes)


def _try_traces(target: TargetModel) -> Steps[TargetModel]:
    store = target.states.make()
    if not isinstance(store, KVStore) or any(cache.window is not None for cache in store.caches):
        return target
    traced = yield from trace_if_faster(
        target.verify, lambda: store.fork(0), takes_trees=target.takes_trees
    )
    return replace(target, traced=traced)


def _find_slots(module: Any, *, bucketed: bool) -> StateFactory:
    """Return a factory for states that followers can mirror: keys and values of all tokens."""
    try:
        windows = windows_of(module)
    except ModelError as error:
        return StateFactory(lambda: KVStore([], bucketed=bucketed), "none", "ranks", str(error))
    return StateFactory(lambda: KVStore(windows, bucketed=bucketed), "slots", "ranks")


def supports_packing(model: Any, make_state: Callable[[], SequenceState]) -> Steps[bool]:
    """Test whether two sequences in one row get the logits that each gets alone."""
    try:
        enable_packing(model)
        alone = yield from _try_passes(model, make_state)
        flat = yield from _try_passes(model, make_state, ModelRunner(model))
    except (ModelError, AttributeError, TypeError, ValueError, KeyError):
        return False  # attention written out for arrays
    finally:
        record_pass(wanted=False)
    return is_close("shared passes", measure_distance(alone, flat), "shared pass")


def find_table(
    model: Any, make_state: Callable[[], SequenceState], attend: Callable[..., mx.array]
) -> Steps[SlotTable | None]:
    """Return a table in which two sequences get the logits that each gets alone, after a test.

    `enable_packing` must have been called.
    """
    runner = ModelRunner(model)
    runner.table = table = SlotTable(attend)
    try:
        alone = yield from _try_passes(model, make_state)
        seated = yield from _try_passes(model, make_state, runner)
    # Models may do anything with keys that are not arrays, and a kernel may not compile.
    except Exception as error:  # noqa: BLE001
        _log.info("shared passes of this model attend sequence by sequence: %s", error)
        return None
    distance = measure_distance(alone, seated)
    return table if is_close("a table for shared passes", distance, "shared pass") else None


def supports_trees(model: Any, make_state: Callable[[], SequenceState]) -> Steps[bool]:
    """Test whether a token of a tree gets the logits that it gets at the end of a chain."""
    tree = read_tree([5, 6, 7, 8, 9], [0, 0, 1, 2])
    try:
        allow_branches(model)
        if not make_state().takes_trees:
            return False
        rows = yield from _try_tree(model, make_state(), tree)
        ends = []
        for row in (3, 4):
            alone = yield from _try_tree(model, make_state(), tree.keep(tree.path(row)))
            ends.append(alone[-1])
    except (ModelError, AttributeError, TypeError, ValueError, KeyError):
        return False  # its own form of positions or masks
    return is_close("trees of tokens", measure_distance(mx.stack(ends), rows[3:]), "tree")


def _try_tree(model: Any, state: SequenceState, tree: TokenTree) -> Steps[mx.array]:
    """Return [rows, vocabulary] logits of a tree after four tokens."""
    runner = ModelRunner(model)
    yield from _feed_four(runner, state)
    part = BatchPart(state, len(tree), partial(state.append_tree, tree), tree.tokens)
    rows = runner.run(Batch([part]))[0].logits
    mx.eval(rows)
    yield
    return rows


def _feed_four(runner: ModelRunner, state: SequenceState) -> Steps[None]:
    runner.run(Batch([_chain(state, [1, 2, 3, 4])]))
    state.commit(4)
    state.evaluate()
    yield


def _try_passes(
    model: Any, make_state: Callable[[], SequenceState], shared: ModelRunner | None = None
) -> Steps[mx.array]:
    """Return [7, vocabulary] logits of two sequences that share a pass of this runner, or do not.

    They are for three tokens after four others, and for the first two of a text; then, after one
    token of each is rejected, for the next one of each.
    """
    alone = ModelRunner(model)
    first, second = make_state(), make_state()
    yield from _feed_four(alone, first)
    parts = [_chain(first, [5, 6, 7]), _chain(second, [8, 9])]
    if shared is None:
        handles = [alone.run(Batch([part]))[0] for part in parts]
    else:
        handles = shared.run(Batch(parts))
        table: Any = shared.table
        if table is not None and not table.is_shared_by(first):
            raise ModelError("there is no room for a table")
    rows = [handle.logits for handle in handles]
    mx.eval(rows)
    yield
    first.commit(6)
    second.commit(1)
    for state, kept in ((first, [5, 6]), (second, [8])):
        owed = kept[len(kept) - state.owed :]
        rows.append(alone.run(Batch([_chain(state, [10], owed)]))[0].logits)
    logits = mx.concatenate(rows).astype(mx.float32)
    mx.eval(logits)
    yield
    return logits


def _chain(state: SequenceState, tokens: Tokens, owed: Tokens | None = None) -> BatchPart:
    """Return a pass over these tokens after those that are owed."""

    def begin() -> Tokens:
        state.append(len(tokens))
        return owed or []

    return BatchPart(state, len(tokens), begin, tokens)
