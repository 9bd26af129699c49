"""The model's forward over a few tokens of one sequence, traced once for each shape.

Building the graph of a forward costs the host milliseconds that a GPU spends waiting. Here
`mx.compile` records it once per number of tokens and size of the KV buffers, fuses its small
operations, and replays it in every later pass of that shape. Whatever changes from pass to
pass is an input of the traced function: the tokens, the position of the first one, and the
buffers. A plain number in their place would become a part of the trace.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from services.kv.cache import KVStore, SlotCache, round_to_bucket

_log = logging.getLogger(__name__)

MOST_ROWS = 9
"""Longer chains are rare, and each length is a trace of its own."""
TRACED_SLOTS = (256, 512)
"""Sizes of the buffers that are traced. A new shape compiles kernels for about a second, which
nobody should wait for in the middle of an answer: what is not traced at load never is."""

_TOLERANCE = 0.02
"""Relative difference of the logits in the trial; half precision rounds coarsely."""
_TRIAL_PROMPT = 24
_TRIAL_ROWS = 4
_TRIALS = 5
"""Passes of each kind that are timed; the fastest counts."""
_WORTHWHILE = 0.97
"""A replay must take at most this share of the time of the model's own forward."""

Forward = Callable[[mx.array, KVStore], mx.array]


class _LayerInputs:
    """One layer's buffers inside the trace; what mlx-lm takes for a KV cache."""

    is_traced = True
    """Attention over it may not be computed by itself, outside the graph."""

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array) -> None:
        self.keys = keys
        self.values = values
        self.offset = offset
        """[] position of the first token."""

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Which slots each of the `n` tokens sees, bool [n, slots]."""
        del return_array
        queries = self.offset + mx.arange(n)[:, None]
        slots = mx.arange(self.keys.shape[2])[None]
        visible = slots <= queries
        return visible if window_size is None else visible & (queries - slots < window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store [1, heads, n, size] from the offset on; return the whole buffers."""
        start = self.offset[None]
        self.keys = mx.slice_update(self.keys, keys, start, axes=(2,))
        self.values = mx.slice_update(self.values, values, start, axes=(2,))
        return self.keys, self.values


class TracedForward:
    """Replays a model's forward over chains of 2 to `MOST_ROWS` tokens; see the module.

    A single token is left to the model: its attention has a kernel for any length, which a
    trace over whole buffers cannot use.

    Args:
        model: called on tokens [1, n] and caches.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._replay: Any = mx.compile(self._forward)
        self._shapes: set[tuple[int, int]] = set()
        """(rows, slots) that have been traced."""

    def serves(self, store: KVStore) -> bool:
        """Whether the store's current frame is a chain of a shape that has been traced."""
        frame = store.frame
        keys = store.caches[0].keys
        if keys is None:
            return False
        slots = max(keys.shape[2], round_to_bucket(frame.start + frame.count))
        return (frame.count, slots) in self._shapes and self.can_trace(store)

    def prepare(self, rows: int, slots: int, new_store: Callable[[], KVStore]) -> None:
        """Trace this shape, and compute it once."""
        store = _prefill(self._model, new_store)
        for cache in store.caches:
            cache.keys, cache.values = _grow(cache.keys, slots), _grow(cache.values, slots)
        store.chain(rows)
        mx.eval(self(mx.arange(1, 1 + rows)[None], store))
        self._shapes.add((rows, slots))

    def can_trace(self, store: KVStore) -> bool:
        """Whether the store's current frame is a chain in plain slots."""
        frame = store.frame
        return (
            1 < frame.count <= MOST_ROWS
            and frame.start > 0
            and frame.visible is None
            and all(type(cache) is SlotCache and cache.window is None for cache in store.caches)
        )

    def __call__(self, tokens: mx.array, store: KVStore) -> mx.array:
        """[1, n, vocabulary] logits of [1, n] tokens, lazy; they are `store`'s current frame."""
        frame = store.frame
        end = frame.start + frame.count
        keys = [_grow(cache.keys, end) for cache in store.caches]
        values = [_grow(cache.values, end) for cache in store.caches]
        # MLX writes in place only what nobody else holds.
        for cache in store.caches:
            cache.keys = cache.values = None
        logits: mx.array
        logits, keys, values = self._replay(tokens, mx.array(frame.start), keys, values)
        for cache, own_keys, own_values in zip(store.caches, keys, values, strict=True):
            cache.keys, cache.values = own_keys, own_values
        return logits

    def _forward(
        self, tokens: mx.array, offset: mx.array, keys: list[mx.array], values: list[mx.array]
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        layers = [_LayerInputs(k, v, offset) for k, v in zip(keys, values, strict=True)]
        logits: mx.array = self._model(tokens, cache=layers)
        return logits, [layer.keys for layer in layers], [layer.values for layer in layers]


def trace_if_faster(model: Any, new_store: Callable[[], KVStore]) -> TracedForward | None:
    """A traced forward for this model, or None where it is wrong or not faster here.

    Args:
        model: see `TracedForward`.
        new_store: an empty store for a sequence of this model.
    """
    traced = TracedForward(model)
    try:
        distance = _compare(model, traced, new_store)
    # Whatever a model does that cannot be traced: control flow on values, caches of its own.
    except Exception as error:  # noqa: BLE001
        _log.info("the forward of this model is not traced: %s", error)
        return None
    if distance is None:
        return None
    if not distance < _TOLERANCE:
        _log.warning("the traced forward is %.2g from the model's own: not used", distance)
        return None
    own = _time(lambda tokens, store: model(tokens, cache=store.caches), model, new_store)
    replayed = _time(traced, model, new_store)
    used = replayed < _WORTHWHILE * own
    _log.info(
        "verifying %d tokens takes %.1f ms traced, %.1f ms otherwise: traces are %s",
        _TRIAL_ROWS,
        1e3 * replayed,
        1e3 * own,
        "used" if used else "not used",
    )
    if not used:
        return None
    for slots in TRACED_SLOTS:
        for rows in range(2, MOST_ROWS + 1):
            traced.prepare(rows, slots, new_store)
    return traced


def _compare(model: Any, traced: TracedForward, new_store: Callable[[], KVStore]) -> float | None:
    """Largest relative difference of the logits at two places of a text; None if unserved."""
    distances = []
    store, other = _prefill(model, new_store), _prefill(model, new_store)
    for start in (5, 9):  # the second replays the trace of the first, somewhere else
        tokens = mx.arange(start, start + _TRIAL_ROWS)[None]
        store.chain(_TRIAL_ROWS)
        other.chain(_TRIAL_ROWS)
        if not traced.can_trace(other):
            return None
        expected = model(tokens, cache=store.caches).astype(mx.float32)
        # Evaluated first: kernels that are tried out before their first use cannot be so in
        # the middle of a trace.
        mx.eval(expected)
        found = traced(tokens, other).astype(mx.float32)
        distance: Any = (mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item()
        distances.append(distance)
    return float(max(distances))


def _time(forward: Forward, model: Any, new_store: Callable[[], KVStore]) -> float:
    """Seconds of the fastest pass."""
    store = _prefill(model, new_store)
    tokens = mx.arange(5, 5 + _TRIAL_ROWS)[None]
    seconds = []
    for _ in range(_TRIALS):
        length = store.length
        store.chain(_TRIAL_ROWS)
        started = time.perf_counter()
        mx.eval(forward(tokens, store))
        seconds.append(time.perf_counter() - started)
        store.trim(length)
    return min(seconds)


def _prefill(model: Any, new_store: Callable[[], KVStore]) -> KVStore:
    store = new_store()
    store.chain(_TRIAL_PROMPT)
    mx.eval(model(mx.arange(1, 1 + _TRIAL_PROMPT)[None], cache=store.caches))
    return store


def _grow(buffer: mx.array | None, end: int) -> mx.array:
    """The buffer, with room for `end` slots."""
    if buffer is None:
        raise ValueError("a chain without tokens before it has no buffers to be traced with")
    missing = round_to_bucket(end) - buffer.shape[2]
    return buffer if missing <= 0 else mx.pad(buffer, [(0, 0), (0, 0), (0, missing), (0, 0)])
