"""A model's forward over the rows of a slot table, traced once for each number of rows.

Like `mlx.tracing.traced_forward` for one sequence. The trace depends only on a pass's number of
rows, the slots that the longest of its sequences needs, and the table's size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from services.batching.table_cache import Attend, TableCache, TableLayer, TablePass
from services.kernels.cuda.blocks import can_write_in_place
from services.kernels.cuda.choice import in_trace
from services.kernels.cuda.kv_rows import find_written
from services.mlx.selftest import check
from services.mlx.tracing.traced_forward import FeatureReader, features_of
from services.runtime.preparation import Steps


class TracedTable:
    """Replays forwards over the layers of a table.

    Args:
        model: called on tokens [1, rows] and caches.
        attend: the attention of a pass.
    """

    def __init__(self, model: Any, attend: Attend) -> None:
        self.model = model
        self._attend = attend
        self._may_write = can_write_in_place(model)
        self.read(None)

    def read(self, reader: FeatureReader | None) -> None:
        """Include the states that a drafter reads in traces."""
        self._reader = reader
        self._replay: Any = mx.compile(self._forward)

    def __call__(
        self, row: mx.array, layers: Sequence[TableLayer], now: TablePass
    ) -> tuple[mx.array, list[mx.array]]:
        """Return lazy [1, rows, head] logits of [1, rows] tokens; the layers hold them afterwards.

        Also return, per layer, an array that is computed once its rows are written in place, if
        they are.
        """
        logits: mx.array
        logits, keys, values, features = self._replay(
            row,
            [now.offset, now.slots, now.first, now.mask],
            [layer.keys for layer in layers],
            [layer.values for layer in layers],
        )
        if self._reader is not None and features:
            self._reader.put(features[0])
        if not values:
            return logits, keys
        for layer, own_keys, own_values in zip(layers, keys, values, strict=True):
            layer.keys, layer.values = own_keys, own_values
        return logits, []

    def _forward(
        self, row: mx.array, now: list[mx.array], keys: list[mx.array], values: list[mx.array]
    ) -> tuple[mx.array, list[mx.array], list[mx.array], list[mx.array]]:
        own = [TableLayer(*pair) for pair in zip(keys, values, strict=True)]
        parts, may_write = TablePass(*now), self._may_write
        caches = [TableCache(layer, parts, self._attend, owned=may_write) for layer in own]
        with in_trace():
            logits: mx.array = self.model(row, cache=caches)
        features = features_of(self._reader)
        if written := find_written(caches):
            return logits, written, [], features
        return logits, [layer.keys for layer in own], [layer.values for layer in own], features


def call_model(
    model: Any, row: mx.array, layers: Sequence[TableLayer], now: TablePass, attend: Attend
) -> mx.array:
    """Return lazy [1, rows, head] logits of one pass; the layers hold its rows afterwards."""
    caches = [TableCache(layer, now, attend) for layer in layers]
    logits: mx.array = model(row, cache=caches)
    return logits


def trace_table_if_faster(
    model: Any, attend: Attend, run: Callable[[TracedTable | None], mx.array]
) -> Steps[TracedTable | None]:
    """Return traced forwards for this model, or None where they are wrong or not faster here.

    `run` computes the same pass each time, with a trace or without, and returns its lazy logits.
    """
    traced = TracedTable(model, attend)
    ways = partial(run, None), partial(run, traced)
    verdict = yield from check("traced shared passes", "trace", *ways, [(), ()])
    return traced if verdict.faster else None
