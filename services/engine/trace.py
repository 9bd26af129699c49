"""A model's forward over a batch, recorded once for each shape and replayed.

Building the graph of a forward costs the host milliseconds during which a GPU waits. Here
`mx.compile` records it once per number of rows and size of the KV buffers, fuses its small
operations, and replays it in every later pass of that shape. Everything that changes from pass to
pass is an input of the recorded function: `BatchArrays`, and the buffers. A plain number in their
place would become part of the trace.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import mlx.core as mx

from services.engine.batch import BatchArrays
from services.kernels.cuda.blocks import can_write_in_place
from services.kernels.cuda.choice import in_trace
from services.kernels.cuda.kv_rows import Attend, TracedLayer, find_written

if TYPE_CHECKING:
    from services.kv.cache import KVStore


class FeatureReader(Protocol):
    """Reads features of the model during its passes (`services.mlx.taps`)."""

    def compute(self) -> mx.array | None:
        """Return [tokens, width] of the last pass, lazy; None if nothing is read."""
        ...

    def put(self, features: mx.array) -> None:
        """Set [tokens, width] features of the last pass, a replay that no reader observes."""
        ...


class LayerBuffers(Protocol):
    """One layer's keys and values, [1, heads, slots, size]."""

    keys: Any
    values: Any


class Replayed(NamedTuple):
    """The results of a replayed pass, lazy."""

    logits: mx.array
    """[1, rows, vocabulary]."""
    features: mx.array | None
    """[rows, width], if some are read."""
    written: list[mx.array]
    """Per layer, an array that is computed once its rows are written in place, if they are."""


class Trace:
    """Replays a model's forward.

    Args:
        model: called on tokens [1, n] and caches.
        attend: the attention over buffers that sequences share.
    """

    def __init__(self, model: Any, *, attend: Attend | None = None) -> None:
        self.model = model
        self._attend = attend
        self.may_write = can_write_in_place(model)
        """True if rows are written into the buffers in place, where the device can."""
        self.read(None)

    def read(self, reader: FeatureReader | None) -> None:
        """Include this reader's features in traces; call again when they change."""
        self.reader = reader
        self._replay: Any = mx.compile(self._forward)

    def __call__(self, batch: BatchArrays, layers: Sequence[LayerBuffers]) -> Replayed:
        """Compute a pass; the layers hold its rows afterwards.

        Args:
            batch: its rows.
            layers: buffers of all layers, exclusive if rows may be written in place.
        """
        logits, features, *buffers = self._replay(
            batch.arrays,
            [layer.keys for layer in layers],
            [layer.values for layer in layers],
        )
        keys, values = buffers
        written: list[mx.array] = []
        if values:
            # MLX writes in place only if no other reference exists: these replace the old ones.
            for layer, *pair in zip(layers, keys, values, strict=True):
                layer.keys, layer.values = pair
        else:
            written = keys
        return Replayed(logits, features[0] if features else None, written)

    def _forward(
        self,
        arrays: list[mx.array],
        keys: list[mx.array],
        values: list[mx.array],
    ) -> tuple[mx.array, *tuple[list[mx.array], ...]]:
        batch = BatchArrays(*arrays)
        layers = [
            TracedLayer(*pair, batch, owned=self.may_write, attend=self._attend)
            for pair in zip(keys, values, strict=True)
        ]
        with in_trace():
            logits: mx.array = self.model(batch.tokens, cache=layers)
        features = self.reader.compute() if self.reader is not None else None
        outputs = logits, [] if features is None else [features]
        if written := find_written(layers):
            return *outputs, written, []
        return *outputs, [layer.keys for layer in layers], [layer.values for layer in layers]


def prefill(model: Any, new_store: "Callable[[], KVStore]", length: int) -> "KVStore":
    """Return a sequence of `length` tokens, for tests."""
    store = new_store()
    store.chain(length)
    mx.eval(model(mx.arange(1, 1 + length)[None], cache=store.caches))
    return store
