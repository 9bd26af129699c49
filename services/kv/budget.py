"""Compute how many tokens of KV fit into the memory reserved for them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from services.engine.batch import BUCKET
from services.kv.state import PassSize, SequenceState
from services.mlx.free_memory import free_for_mlx

_SHARE = 0.5
"""Share of the free memory without `kv_bytes`; the rest is for drafts, prompts and the system."""


class KVSize(NamedTuple):
    """Memory of one sequence's state."""

    per_token: int
    """Bytes per token, once buffers have grown."""
    fixed: int
    """Bytes that do not depend on the length: windows and recurrent states."""
    passes: PassSize = PassSize()
    """What its passes need in addition to products and slots."""


class KVTokens(NamedTuple):
    """The token budget shared by the states of all sequences."""

    tokens: int
    """0 means unlimited."""
    limit: str
    """What limits it, in words."""


def measure_kv(model: Any, make_state: Callable[[], SequenceState]) -> KVSize:
    """Measure the memory of the model's state from its shapes, without computing anything."""
    state = make_state()
    state.append(1, whole=True)
    model(mx.array([[1]]), cache=state.caches)
    state.commit(1)
    per_token, passes = state.bytes_per_token, state.pass_size
    fixed = max(0, state.nbytes - BUCKET * per_token) + passes.windows
    return KVSize(per_token, fixed, passes)


def count_kv_tokens(size: KVSize, kv_bytes: int) -> KVTokens:
    """Return the tokens that fit into `kv_bytes`; 0 bytes mean a share of the memory now free."""
    free = free_for_mlx()
    budget, limit = kv_bytes, "kv_bytes"
    if not kv_bytes:
        budget, limit = int(_SHARE * free.bytes), f"kv_bytes; half of what {free.limit} leaves"
    if not size.per_token:
        return KVTokens(0, limit)
    return KVTokens(max(1, (budget - size.fixed) // size.per_token), limit)
