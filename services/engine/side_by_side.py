"""Rows that advance together, one token per pass: by the model itself, or from traces.

A depth of a small drafter costs the host, which builds the graph, more than the GPU, which computes
it. From a trace (`engine.trace`) the slots and masks of the next pass are outputs next to the
logits, so that nothing has to be sent to the device between two passes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from services.engine.batch import Batch, Shape, Span
from services.engine.trace import Trace
from services.kv.cache import KVStore


class SideBySide(Protocol):
    """Tokens that advance together: each pass feeds one more after each."""

    count: int
    """Rows of a pass, padding included."""

    def feed(self, tokens: mx.array) -> mx.array:
        """Return lazy [count, head] logits after these [count] tokens."""
        ...


class PlainBranches:
    """Branches after a trunk, computed by the model itself.

    Args:
        model: called on tokens [1, n] and caches.
        store: holds their keys and values.
        span: of the first pass.
    """

    def __init__(self, model: Any, store: KVStore, span: Span) -> None:
        self._model, self._store, self._span = model, store, span
        self.count = span.count

    def feed(self, tokens: mx.array) -> mx.array:
        """Return logits of a pass over the branches; see `SideBySide`."""
        self._store.place(self._span)
        logits: mx.array = self._model(tokens[None], cache=self._store.caches)[0]
        self._span = self._span.following()
        return logits


class PlainChain:
    """A trunk that advances, computed by the model; the first pass may have several tokens."""

    count = 1

    def __init__(self, model: Any, store: KVStore) -> None:
        self._model, self._store = model, store

    def feed(self, tokens: mx.array) -> mx.array:
        """Return [tokens, head] logits; see `SideBySide`."""
        length = self._store.length
        self._store.chain(tokens.size)
        try:
            logits: mx.array = self._model(tokens[None], cache=self._store.caches)[0]
        except BaseException:
            self._store.trim(length)
            raise
        return logits


class TracedRows:
    """Replaces `PlainBranches`, or `PlainChain` if the row is the trunk, by a trace.

    Args:
        trace: of the model.
        store: holds their keys and values.
        span: of the first pass.
        shape: of the trace.
        depth: passes that the buffers have room for.
        is_trunk: True if the only row advances the trunk.
    """

    def __init__(
        self,
        trace: Trace,
        store: KVStore,
        span: Span,
        shape: Shape,
        *,
        depth: int,
        is_trunk: bool,
    ) -> None:
        self._left = depth
        self._trace, self._store, self._is_trunk = trace, store, is_trunk
        self.count = shape.rows
        self._stride = mx.array(span.count, mx.int32)
        self._place: Sequence[mx.array] = span.pad(shape.rows, shape.slots)
        store.widen(shape.slots)

    @property
    def has_room(self) -> bool:
        """True if another pass fits into the buffers."""
        return self._left > 0

    def feed(self, tokens: mx.array) -> mx.array:
        """Return logits of a replayed pass; see `SideBySide`."""
        if not self._left:
            # MLX does not check where it writes.
            raise IndexError("the buffers have no room for another pass")
        self._left -= 1
        batch = Batch(tokens[None], *self._place)
        replayed = self._trace(batch, self._store.caches, self._stride)
        self._place = replayed.following
        if self._is_trunk:
            self._store.chain(1)
        return replayed.logits[0]
