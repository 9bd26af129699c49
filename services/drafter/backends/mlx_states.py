"""The state that an MLX drafter keeps for a sequence."""

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from services.kv.branching import BranchingState
from services.kv.cache import KVStore
from services.kv.rewinding import find_branching
from services.mlx.loader import windows_of


def is_recurrent(model: Any) -> bool:
    """Return True if layers depend on an order beyond their positions."""
    return any(type(cache) is ArraysCache for cache in make_prompt_cache(model))


def find_states(model: Any, *, bucketed: bool) -> Callable[[], KVStore | BranchingState]:
    """Return a factory for the states of sequences: slots, and recurrent states if necessary."""
    if is_recurrent(model):
        return find_branching(model, bucketed=bucketed)
    windows = windows_of(model)
    return lambda: KVStore(windows, bucketed=bucketed)
