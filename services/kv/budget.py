"""How many tokens of KV fit into the memory that is meant for them."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import psutil

from services.kv.cache import KVStore
from services.mlx.loader import compute_unit

_SHARE = 0.5
"""Of the free memory, where nothing was said: the rest is for drafts, prompts and the system."""


def kv_tokens(model: Any, windows: Sequence[int | None], kv_bytes: int) -> int:
    """Tokens that fit into `kv_bytes`; 0 bytes stand for a share of what is free now.

    Returns 0, which means any number, if nobody knows how much is free.
    """
    budget = kv_bytes or int(_SHARE * _free_bytes())
    if not budget:
        return 0
    store = KVStore(windows, bucketed=False)
    store.chain(1)
    model(mx.array([[1]]), cache=store.caches)  # lazy: only shapes are asked for
    slots = max((array.shape[2] for cache in store.caches for array in cache.state), default=1)
    return max(1, budget * slots // max(1, store.nbytes))


def _free_bytes() -> int:
    if compute_unit() == "cuda":
        info: dict[str, Any] = mx.device_info()
        return int(info.get("free_memory", info.get("total_memory", 0)))
    return psutil.virtual_memory().available
