"""How many tokens of KV fit into the memory that is meant for them."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import psutil

from services.kv.cache import BUCKET
from services.kv.state import SequenceState
from services.mlx.loader import compute_unit

_SHARE = 0.5
"""Of the free memory, where nothing was said: the rest is for drafts, prompts and the system."""


def kv_tokens(model: Any, make_state: Callable[[], SequenceState], kv_bytes: int) -> int:
    """Tokens that fit into `kv_bytes`; 0 bytes stand for a share of what is free now.

    Returns 0, which means any number, if a token adds nothing, or the free memory is unknown.
    """
    budget = kv_bytes or int(_SHARE * _free_bytes())
    if not budget:
        return 0
    state = make_state()
    state.append(1, whole=True)
    model(mx.array([[1]]), cache=state.caches)  # lazy: only shapes are asked for
    state.commit(1)
    if not state.bytes_per_token:
        return 0
    return max(1, (budget - _count_fixed_bytes(state)) // state.bytes_per_token)


def _count_fixed_bytes(state: SequenceState) -> int:
    """What a sequence holds besides its tokens: windows and recurrent states."""
    return max(0, state.nbytes - BUCKET * state.bytes_per_token)


def _free_bytes() -> int:
    if compute_unit() == "cuda":
        info: dict[str, Any] = mx.device_info()
        return int(info.get("free_memory", info.get("total_memory", 0)))
    return psutil.virtual_memory().available
