"""What an MLX drafter keeps of a sequence."""

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from services.kv.branching import BranchingState
from services.kv.cache import KVStore, windows_of
from services.kv.rewinding import find_branching


def is_recurrent(model: Any) -> bool:
    """Whether layers know an order that is not in their positions."""
    return any(type(cache) is ArraysCache for cache in make_prompt_cache(model))


def find_states(model: Any, *, bucketed: bool) -> Callable[[], KVStore | BranchingState]:
    """Makes the states of sequences: slots, beside recurrent states if it has such layers."""
    if is_recurrent(model):
        return find_branching(model, bucketed=bucketed)
    windows = windows_of(model)
    return lambda: KVStore(windows, bucketed=bucketed)
