"""Several sequences in one flat row of tokens, with attention and recurrences per sequence.

Linear layers see the row as one matrix, so the weights are read once for all sequences. A
`PackedCache` represents one layer's caches of all sequences: it gives the model `SharedKV` instead
of arrays, which models pass on untouched to mlx-lm's attention function. Our replacement for that
function attends each part to its own keys with its own mask, in the shapes that it has alone. A
model that handles keys differently fails on `SharedKV`, which `supports_packing` detects.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList

from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.errors import ModelError
from services.engine.batch import slice_rows
from services.engine.slot_table import SlotTable
from services.kernels.cuda.kv_rows import SharedKV, wait_for
from services.kernels.register import kernels
from services.kv.cache import KVStore
from services.kv.layered import LayeredState, flatten_caches
from services.kv.recording import record_pass
from services.kv.shared_recurrence import SharedRecurrence
from services.kv.state import SequenceState
from services.mlx.rope import allow_branches, has_rope
from services.mlx.selftest import is_close, measure_distance
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)

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


def supports_packing(model: Any, make_state: Callable[[], SequenceState]) -> Steps[bool]:
    """Test whether two sequences in one row get the logits that each gets alone."""
    try:
        enable_packing(model)
        alone = yield from _try_passes(model, make_state, flat=False)
        flat = yield from _try_passes(model, make_state, flat=True)
    except (ModelError, AttributeError, TypeError, ValueError, KeyError):
        return False  # attention written out for arrays
    finally:
        record_pass(wanted=False)
    return is_close("shared passes", measure_distance(alone, flat), "shared pass")


def find_table(
    model: Any, make_state: Callable[[], SequenceState], attend: Callable[..., mx.array]
) -> Steps[SlotTable | None]:
    """Return a table in which two sequences get the logits that each gets alone, after a test.

    `enable_packing` must have been called.
    """
    table = SlotTable(attend)
    try:
        alone = yield from _try_passes(model, make_state, flat=False)
        seated = yield from _try_passes(model, make_state, flat=True, table=table)
    # Models may do anything with keys that are not arrays, and a kernel may not compile.
    except Exception as error:  # noqa: BLE001
        _log.info("shared passes of this model attend sequence by sequence: %s", error)
        return None
    distance = measure_distance(alone, seated)
    return table if is_close("a table for shared passes", distance, "shared pass") else None


def supports_trees(model: Any, make_state: Callable[[], SequenceState]) -> Steps[bool]:
    """Test whether a token of a tree gets the logits that it gets at the end of a chain."""
    tree = read_tree([5, 6, 7, 8, 9], [0, 0, 1, 2])
    try:
        allow_branches(model)
        if not make_state().takes_trees:
            return False
        rows = yield from _try_tree(model, make_state(), tree)
        ends = []
        for row in (3, 4):
            alone = yield from _try_tree(model, make_state(), tree.keep(tree.path(row)))
            ends.append(alone[-1])
    except (ModelError, AttributeError, TypeError, ValueError, KeyError):
        return False  # its own form of positions or masks
    return is_close("trees of tokens", measure_distance(mx.stack(ends), rows[3:]), "tree")


def _try_tree(model: Any, state: SequenceState, tree: TokenTree) -> Steps[mx.array]:
    """Return [rows, vocabulary] logits of a tree after four tokens."""
    yield from _feed_four(model, state)
    state.append_tree(tree)
    rows: mx.array = model(mx.array([tree.tokens]), cache=state.caches)[0].astype(mx.float32)
    mx.eval(rows)
    yield
    return rows


def _feed_four(model: Any, state: SequenceState) -> Steps[None]:
    state.append(4)
    model(mx.array([[1, 2, 3, 4]]), cache=state.caches)
    state.commit(4)
    state.evaluate()
    yield


def _try_passes(
    model: Any,
    make_state: Callable[[], SequenceState],
    *,
    flat: bool,
    table: SlotTable | None = None,
) -> Steps[mx.array]:
    """Return [7, vocabulary] logits of two sequences that share a pass, or do not.

    They are for three tokens after four others, and for the first two of a text; then, after one
    token of each is rejected, for the next one of each.
    """
    first, second = make_state(), make_state()
    yield from _feed_four(model, first)
    tokens = ([5, 6, 7], [8, 9])
    if flat:
        rows = [_run_flat(model, (first, second), tokens, table)]
    else:
        rows = [_run_alone(model, *one) for one in zip((first, second), tokens, strict=True)]
    mx.eval(rows)
    yield
    first.commit(6)
    second.commit(1)
    for state, stood in ((first, [5, 6]), (second, [8])):
        owed = stood[len(stood) - state.owed :]
        rows.append(_run_alone(model, state, [*owed, 10])[-1:])
    logits = mx.concatenate(rows).astype(mx.float32)
    mx.eval(logits)
    yield
    return logits


def _run_alone(model: Any, state: SequenceState, tokens: list[int]) -> mx.array:
    state.append(len(tokens) - state.owed)
    rows: mx.array = model(mx.array([tokens]), cache=state.caches)[0]
    return rows


def _run_flat(
    model: Any,
    states: Sequence[Any],
    tokens: Sequence[list[int]],
    table: SlotTable | None,
) -> mx.array:
    for state, own in zip(states, tokens, strict=True):
        state.append(len(own))
    row = mx.array([[*tokens[0], *tokens[1]]])
    if table is not None:
        seated = table.run(model, row, states)
        if seated is None:
            raise ModelError("there is no room for a table")
        return seated[0]
    with pack_pass(states, in_batches=kernels().batches_recurrences) as caches:
        rows: mx.array = model(row, cache=caches)[0]
    return rows
