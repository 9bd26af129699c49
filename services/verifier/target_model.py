"""The target as the verifier's passes see it: here as a whole, or spread over ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.errors import ModelError
from services.batching.packing import supports_packing
from services.kv.cache import KVStore, windows_of
from services.kv.rewinding import StateFactory, find_rewinding
from services.mlx.fused_linear import fuse_linears
from services.mlx.loader import compute_unit
from services.mlx.rope import use_tables
from services.mlx.traced_forward import TracedForward, trace_if_faster


@dataclass(frozen=True, kw_only=True)
class TargetModel:
    """How to compute with the target."""

    verify: Callable[..., Any]
    """(tokens[1, n], cache=caches) -> logits[1, n, vocabulary]"""
    prefill: Callable[..., Any]
    """The same where only the KV is wanted; its result must not be used."""
    states: StateFactory
    """Makes the states of sequences; of the layers that are here."""
    bucketed: bool
    """See `KVStore`."""
    shares_passes: bool
    """Whether several sequences may share a pass."""
    pipelines: bool
    """Whether a pass may begin before its token has been read."""
    traced: TracedForward | None
    """On a GPU that would wait for this process to build its passes."""


def prepare(module: Any, *, is_part: bool = False, may_share_passes: bool = True) -> TargetModel:
    """Make an mlx-lm model ready for the verifier; changes its layers where that is faster.

    Args:
        module: the model.
        is_part: whether it is one rank's part, which computes in step with the others.
        may_share_passes: whether it is worth trying to put several sequences into a pass.
    """
    on_cpu, bucketed = compute_unit() == "cpu", compute_unit() == "cuda"
    if on_cpu:
        use_tables(module)
    if bucketed:
        fuse_linears(module)
    states = (
        _find_slots(module, bucketed=bucketed)
        if is_part
        else find_rewinding(module, bucketed=bucketed)
    )
    shares = may_share_passes and states.rewinds and supports_packing(module, states.make)
    return TargetModel(
        verify=module,
        prefill=module,
        states=states,
        bucketed=bucketed,
        shares_passes=shares,
        # On a CPU the pass and this process would want the same cores.
        pipelines=not on_cpu,
        traced=None if on_cpu or is_part else _trace(module, states),
    )


def _find_slots(module: Any, *, bucketed: bool) -> StateFactory:
    """One rank's states, which its followers can repeat: keys and values of all tokens."""
    try:
        windows = windows_of(module)
    except ModelError as error:
        return StateFactory(lambda: KVStore([], bucketed=bucketed), "none", "ranks", str(error))
    return StateFactory(lambda: KVStore(windows, bucketed=bucketed), "slots", "ranks")


def _trace(module: Any, states: StateFactory) -> TracedForward | None:
    store = states.make()
    if not isinstance(store, KVStore) or any(cache.window is not None for cache in store.caches):
        return None
    return trace_if_faster(module, lambda: store.fork(0))
