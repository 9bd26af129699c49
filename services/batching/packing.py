"""Several sequences in one flat row of tokens: attention part by part, all else at once.

To the linear layers a row is one matrix, so the weights are read once for all sequences.
A `PackedCache` stands for one layer's caches of all sequences: it hands the model `PackedKV`
instead of arrays, which models pass on untouched to mlx-lm's attention function. Ours, in
its place, attends each part to its own keys with its own mask, in the shapes that it has
alone. A model that treats keys in a way of its own fails on `PackedKV`, and is found out by
`supports_packing`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention

from protocol.errors import ModelError
from services.kv.cache import KVStore
from services.kv.state import SequenceState
from services.mlx import cpu_attention, decode_attention
from services.mlx.loader import compute_unit
from services.mlx.rope import allow_branches

_NAME = "scaled_dot_product_attention"
_TOLERANCE = 0.05
"""Relative difference of the logits in the trial; half precision rounds coarsely."""


@dataclass(frozen=True)
class PackedKV:
    """What belongs to each sequence of a row, in its order: keys, values or masks."""

    values: list[Any]
    borders: list[int]
    """Where the parts of the row but the first begin."""


class PackedCache:
    """One layer's caches of all sequences in a row; what mlx-lm takes for a KV cache."""

    def __init__(self, caches: Sequence[Any], borders: list[int], offset: mx.array) -> None:
        self._caches = caches
        self._borders = borders
        self.offset = offset
        """[tokens] RoPE position of each token of the row."""

    @property
    def stores(self) -> list[KVStore]:
        """The sequences of the row, in its order."""
        return [store for cache in self._caches for store in cache.stores]

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> PackedKV:
        """The mask of each part; `n` is the number of tokens in the row."""
        ends = [*self._borders, n]
        counts = np.diff([0, *ends])
        masks = [
            cache.make_mask(int(count), return_array=return_array, window_size=window_size)
            for cache, count in zip(self._caches, counts, strict=True)
        ]
        return PackedKV(masks, self._borders)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PackedKV, PackedKV]:
        """Store each part's [1, heads, count, size]; return the parts' own slots."""
        pieces = zip(
            self._caches,
            mx.split(keys, self._borders, axis=2),
            mx.split(values, self._borders, axis=2),
            strict=True,
        )
        stored = [
            cache.update_and_fetch(own_keys, own_values) for cache, own_keys, own_values in pieces
        ]
        return PackedKV([k for k, _ in stored], self._borders), PackedKV(
            [v for _, v in stored], self._borders
        )


def pack_caches(states: Sequence[SequenceState]) -> list[PackedCache]:
    """The caches for one forward over the passes of these sequences, laid end to end."""
    positions = [state.positions for state in states]
    borders = [int(end) for end in np.cumsum([len(rows) for rows in positions])[:-1]]
    # One array for all layers: they share the sines of a position by its identity.
    offset = mx.array(np.concatenate(positions), dtype=mx.int32)
    layers = zip(*(state.caches for state in states), strict=True)
    return [PackedCache(layer, borders, offset) for layer in layers]


_KERNELS: dict[str, Callable[..., mx.array | None]] = {
    "cpu": cpu_attention.attend,
    "cuda": decode_attention.attend,
}


def _by_parts(attend: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's attention, which also takes `PackedKV`."""

    @wraps(attend)
    def attention(  # noqa: PLR0917  # mlx-lm's signature
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if not isinstance(keys, PackedKV):
            return attend(queries, keys, values, cache, scale, mask, sinks)
        rows = mx.split(queries, keys.borders, axis=2)
        parts = zip(rows, keys.values, values.values, mask.values, strict=True)
        answers = [attend(q, k, v, cache, scale, own, sinks) for q, k, v, own in parts]
        return mx.concatenate(answers, axis=2)

    return attention


@wraps(scaled_dot_product_attention)
def _attend(  # noqa: PLR0917  # mlx-lm's signature
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's attention, by a kernel of ours where there is one and the call is of its kind.

    Without a cache this may be a step of training, which needs gradients.
    """
    unit = compute_unit()
    kernel = _KERNELS.get(unit)
    plain = sinks is None and not hasattr(cache, "bits")
    in_graph = unit == "cpu" and getattr(cache, "is_traced", False)
    if kernel is not None and plain and cache is not None and not in_graph:
        own = kernel(queries, keys, values, scale, mask)
        if own is not None:
            return own
    found: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return found


_attention = _by_parts(_attend)


def enable_packing(model: nn.Module) -> None:
    """Let the model's attention take `PackedKV`, and its RoPE a position per token.

    Raises:
        ModelError: the model has no RoPE that takes positions (see `allow_branches`).
    """
    allow_branches(model)
    for module in {type(layer).__module__ for _, layer in model.named_modules()}:
        home = sys.modules[module]
        if getattr(home, _NAME, None) is scaled_dot_product_attention:
            setattr(home, _NAME, _attention)


def supports_packing(model: Any, make_state: Callable[[], SequenceState]) -> bool:
    """Whether two sequences in one row get the logits that each gets alone: tried out."""
    try:
        enable_packing(model)
        alone = _try_passes(model, make_state, flat=False)
        flat = _try_passes(model, make_state, flat=True)
    except (ModelError, AttributeError, TypeError, ValueError, KeyError):
        return False  # attention written out for arrays
    distance = np.array(mx.linalg.norm(flat - alone) / mx.linalg.norm(alone))
    return bool(mx.all(mx.isfinite(flat)).item()) and float(distance) < _TOLERANCE


def _try_passes(model: Any, make_state: Callable[[], SequenceState], *, flat: bool) -> mx.array:
    """[5, vocabulary] logits of three tokens after four others, and of the first two of a text."""
    first, second = make_state(), make_state()
    first.append(4)
    model(mx.array([[1, 2, 3, 4]]), cache=first.caches)
    first.append(3)
    if flat:
        second.append(2)
        caches: Any = pack_caches([first, second])
        row: mx.array = model(mx.array([[5, 6, 7, 8, 9]]), cache=caches)[0]
        return row.astype(mx.float32)
    rows = [model(mx.array([[5, 6, 7]]), cache=first.caches)[0]]
    second.append(2)
    rows.append(model(mx.array([[8, 9]]), cache=second.caches)[0])
    return mx.concatenate(rows).astype(mx.float32)
