"""The target as the verifier's passes see it: as a whole, or spread over ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from protocol.errors import ModelError
from services.batching.packing import find_table, supports_packing, supports_trees
from services.batching.slot_table import SlotTable
from services.kernels.cpu.decoder import fill_only, kernel_of
from services.kernels.cpu.equip import equip
from services.kv.cache import KVStore, windows_of
from services.kv.rewinding import StateFactory, find_rewinding
from services.mlx.cuda.attention import attend_table
from services.mlx.cuda.equip import equip_for_cuda
from services.mlx.loader import compute_unit
from services.mlx.rope import use_tables
from services.mlx.taps import TrialPasses
from services.mlx.tracing.forward_trial import trace_if_faster
from services.mlx.tracing.traced_forward import FeatureReader, TracedForward


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
    shares_passes: bool
    """True if several sequences can share a pass."""
    takes_trees: bool
    """True if a pass can be over a tree of tokens."""
    table: SlotTable | None
    """Slot table for shared passes in which one attention kernel serves all sequences."""
    pipelines: bool
    """True if a pass can start before its token has been read."""
    traced: TracedForward | None
    """Traced passes on a GPU, which would otherwise wait for this process to build them."""
    trial: TrialPasses | None = None
    """How a rank's part tests if a drafter can read it."""

    @property
    def shares_prompts(self) -> bool:
        """True if the chunks of several prompts may share a pass.

        Products of many rows round differently in a batch, and a resumed recurrent prompt must have
        the bits of a fresh one.
        """
        return self.shares_passes and self.states.way != "replay"

    def read(self, reader: FeatureReader) -> None:
        """Include this reader's present features in replayed passes."""
        for traced in (self.traced, self.table):
            if traced is not None:
                traced.read(reader)

    def run_alone(self, tokens: mx.array) -> mx.array:
        """Return logits [1, n, vocabulary] of tokens [1, n], without a sequence."""
        state = self.states.make()
        state.append(tokens.shape[1], whole=True)
        logits: mx.array = self.verify(tokens, cache=state.caches)
        return logits


def prepare(module: Any, *, is_part: bool = False, may_share_passes: bool = True) -> TargetModel:
    """Prepare an mlx-lm model for the verifier; changes its layers where that is faster.

    Args:
        module: the model.
        is_part: True if it is one rank's part, which computes in step with the others.
        may_share_passes: True to test if several sequences can share a pass.
    """
    on_cpu, bucketed = compute_unit() == "cpu", compute_unit() == "cuda"
    if on_cpu and kernel_of(module) is None and (is_part or not equip(module)):
        use_tables(module)
    if bucketed:
        equip_for_cuda(module)
    states = (
        _find_slots(module, bucketed=bucketed)
        if is_part
        else find_rewinding(module, bucketed=bucketed, whole=kernel_of(module) is not None)
    )
    shares = may_share_passes and states.rewinds and supports_packing(module, states.make)
    takes_trees = states.rewinds and not is_part and supports_trees(module, states.make)
    return TargetModel(
        verify=module,
        prefill=fill_only(module),
        states=states,
        bucketed=bucketed,
        shares_passes=shares,
        takes_trees=takes_trees,
        table=_find_table(module, states) if bucketed and shares and not is_part else None,
        # On a CPU the pass and this process would compete for cores.
        pipelines=not on_cpu,
        traced=None if on_cpu or is_part else _trace(module, states, takes_trees=takes_trees),
    )


def _find_slots(module: Any, *, bucketed: bool) -> StateFactory:
    """Return a factory for states that followers can mirror: keys and values of all tokens."""
    try:
        windows = windows_of(module)
    except ModelError as error:
        return StateFactory(lambda: KVStore([], bucketed=bucketed), "none", "ranks", str(error))
    return StateFactory(lambda: KVStore(windows, bucketed=bucketed), "slots", "ranks")


def _find_table(module: Any, states: StateFactory) -> SlotTable | None:
    """Return a table for shared passes on CUDA, if the model and the kernel support one."""
    table = find_table(module, states.make, attend_table)
    if table is not None:
        table.warm_up(module, states.make)
        table.drop_if_empty()
    return table


def _trace(module: Any, states: StateFactory, *, takes_trees: bool) -> TracedForward | None:
    store = states.make()
    if not isinstance(store, KVStore) or any(cache.window is not None for cache in store.caches):
        return None
    return trace_if_faster(module, lambda: store.fork(0), takes_trees=takes_trees)
