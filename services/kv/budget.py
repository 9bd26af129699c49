"""How many tokens of KV fit into the memory that is meant for them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from services.kv.slots import BUCKET
from services.kv.state import PassSize, SequenceState
from services.mlx.free_memory import free_for_mlx

_SHARE = 0.5
"""Of the free memory, where nothing was said: the rest is for drafts, prompts and the system."""


class KVSize(NamedTuple):
    """Memory of one sequence's state."""

    per_token: int
    """Bytes, in the long run."""
    fixed: int
    """What a sequence holds besides its tokens: windows and recurrent states."""
    passes: PassSize = PassSize()
    """What its passes take beside products and slots."""


class KVTokens(NamedTuple):
    """Token budget that the states of all sequences share."""

    tokens: int
    """0 stands for any number."""
    limit: str
    """What it follows from, for people."""


def measure_kv(model: Any, make_state: Callable[[], SequenceState]) -> KVSize:
    """Ask the model for shapes; nothing is computed."""
    state = make_state()
    state.append(1, whole=True)
    model(mx.array([[1]]), cache=state.caches)
    state.commit(1)
    per_token, passes = state.bytes_per_token, state.pass_size
    fixed = max(0, state.nbytes - BUCKET * per_token) + passes.windows
    return KVSize(per_token, fixed, passes)


def count_kv_tokens(size: KVSize, kv_bytes: int) -> KVTokens:
    """Tokens that fit into `kv_bytes`; 0 bytes stand for a share of what is free now."""
    free = free_for_mlx()
    budget, limit = kv_bytes, "kv_bytes"
    if not kv_bytes:
        budget, limit = int(_SHARE * free.bytes), f"kv_bytes; half of what {free.limit} leaves"
    if not size.per_token:
        return KVTokens(0, limit)
    return KVTokens(max(1, (budget - size.fixed) // size.per_token), limit)
