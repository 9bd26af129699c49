"""Several sequences in one flat row of tokens, with attention and recurrences per sequence.

Linear layers see the row as one matrix, so the weights are read once for all sequences. A
`PackedCache` represents one layer's caches of all sequences: it gives the model `SharedKV` instead
of arrays, which models pass on untouched to mlx-lm's attention function. Our replacement for that
function attends each part to its own keys with its own mask, in the shapes that it has alone. A
model that handles keys differently fails on `SharedKV`, which a test finds out (`target_model`).
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList

from services.engine.batch import slice_rows
from services.kernels.cuda.kv_rows import SharedKV, wait_for
from services.kernels.register import kernels
from services.kv.cache import KVStore
from services.kv.layered import LayeredState, flatten_caches
from services.kv.shared_recurrence import SharedRecurrence
from services.kv.state import SequenceState
from services.mlx.rope import allow_branches, has_rope

_NAME = "scaled_dot_product_attention"


class PackedCache:
    """One layer's caches of all sequences in a row, in the form of an mlx-lm KV cache."""

    def __init__(self, caches: Sequence[Any], rows: list[slice], offset: mx.array) -> None:
        self._caches, self._rows = caches, rows
        self.offset = offset
        """[tokens] RoPE position of each token of the row."""

    @property
    def stores(self) -> list[KVStore]:
        """The sequences of the row, in order."""
        return [store for cache in self._caches for store in cache.stores]

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> SharedKV:
        """Return the mask of each part; `n` is the number of tokens in the row."""
        if n != self._rows[-1].stop:
            raise ValueError(f"a mask of {n} rows for a pass over {self._rows[-1].stop}")
        masks = [
            cache.make_mask(
                rows.stop - rows.start, return_array=return_array, window_size=window_size
            )
            for cache, rows in zip(self._caches, self._rows, strict=True)
        ]
        return SharedKV(masks, self._attend)

    @property
    def plain_stores(self) -> list[KVStore] | None:
        """Stores of the sequences, or None if one keeps more than keys and values."""
        stores = [getattr(cache, "plain_stores", None) for cache in self._caches]
        return [store for own in stores for store in own or ()] if all(stores) else None

    def _split(self, rows: mx.array) -> list[mx.array]:
        """Split [1, heads, rows, size] into the parts of the sequences."""
        parts: Any = mx.split(rows, [part.start for part in self._rows[1:]], axis=2)
        return list(parts)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[SharedKV, SharedKV]:
        """Store each part's [1, heads, count, size]; return the slots of each sequence."""
        parts = zip(self._caches, self._split(keys), self._split(values), strict=True)
        stored = [cache.update_and_fetch(*pair) for cache, *pair in parts]
        return (
            SharedKV([keys for keys, _ in stored], self._attend),
            SharedKV([values for _, values in stored], self._attend),
        )

    def _attend(  # noqa: PLR0917  # mlx-lm's signature
        self,
        queries: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend each part to the keys of its sequence."""
        parts = zip(self._split(queries), keys, values, mask.content, strict=True)
        answers = [_attend(q, k, v, cache, scale, masked, sinks) for q, k, v, masked in parts]
        return mx.concatenate(answers, axis=2)


def pack_caches(
    states: Sequence[SequenceState], shared: SharedRecurrence | None = None
) -> list[Any]:
    """Pack the caches for one forward over the passes of these sequences, concatenated.

    Layers with recurrent states need the `shared` pass, which must be the current one.

    Raises:
        TypeError: a layer has a recurrent state that cannot be recomputed.
    """
    spans = [state.span for state in states]
    positions, rows = [span.own_positions for span in spans], slice_rows(spans)
    # One array for all layers: they share the sines of a position by its identity.
    offset = mx.array(np.concatenate(positions), dtype=mx.int32)
    sources = iter(_recurrent_sources(states))

    def pack(caches: Sequence[Any]) -> Any:
        if type(caches[0]) is CacheList:
            inner = zip(*(cache.caches for cache in caches), strict=True)
            joined: Any = CacheList
            return joined(*map(pack, inner))
        if type(caches[0]) is ArraysCache and shared is not None:
            return shared.pack(caches, next(sources))
        return PackedCache(caches, rows, offset)

    return [pack(layer) for layer in zip(*(state.caches for state in states), strict=True)]


@contextlib.contextmanager
def pack_pass(states: Sequence[SequenceState], *, in_batches: bool) -> Iterator[list[Any]]:
    """Pack the caches for one forward over the passes of these sequences, inside this context.

    `in_batches`: see `SharedRecurrence`.
    """
    recordings = [state.recording if isinstance(state, LayeredState) else None for state in states]
    spans = [state.span for state in states]
    shared = SharedRecurrence(spans, recordings, in_batches=in_batches)
    with shared:
        yield pack_caches(states, shared)


def _recurrent_sources(states: Sequence[SequenceState]) -> list[list[int | None]]:
    """Return the sources of each recurrent layer, as in `PackedArrays`."""
    first = states[0]
    if not any(type(cache) is ArraysCache for cache in flatten_caches(first.caches)):
        return []
    if not isinstance(first, LayeredState) or first.replay is None:
        raise TypeError("recurrent states of an unknown kind cannot share a pass")
    return first.replay.sources


@wraps(scaled_dot_product_attention)
def _attention(  # noqa: PLR0917  # mlx-lm's signature
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Compute mlx-lm's attention, also over the keys of several sequences."""
    queries = wait_for(getattr(cache, "pending", None), queries)
    if isinstance(keys, SharedKV):
        return keys.attend(queries, keys.content, values.content, cache, scale, mask, sinks)
    return _attend(queries, keys, values, cache, scale, mask, sinks)


_attention.waits_for_rows = True  # type: ignore[attr-defined]


def _attend(  # noqa: PLR0917  # mlx-lm's signature
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attend one sequence to its keys, by our own kernel if there is one for this call.

    Without a cache this may be a training step, which needs gradients.
    """
    ours = kernels()
    plain = sinks is None and not hasattr(cache, "bits")
    fits = ours.attends_in_traces or not getattr(cache, "is_traced", False)
    if plain and cache is not None and fits:
        for attend in ours.attend:
            own = attend(queries, keys, values, scale, mask)
            if own is not None:
                return own
    out: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return out


def enable_packing(model: nn.Module) -> None:
    """Let the model's attention take `SharedKV`, and its RoPE a position per token.

    Raises:
        ModelError: its RoPE takes no positions (see `allow_branches`).
    """
    if has_rope(model):
        allow_branches(model)
    for module in {type(layer).__module__ for _, layer in model.named_modules()}:
        home = sys.modules[module]
        if getattr(home, _NAME, None) is scaled_dot_product_attention:
            setattr(home, _NAME, _attention)
