"""Self-test of decoder blocks: are ours correct, and faster than MLX's with our products?"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from protocol.jobs.kernel_report import KernelProbe
from services.engine.batch import BatchArrays
from services.kernels.cuda.choice import in_trace
from services.kernels.cuda.kv_rows import TracedLayer
from services.mlx.selftest import check
from services.runtime.preparation import Steps

BLOCKS = 4
"""Number of blocks tested."""
_ROWS, _TIMED_ROWS = (1, 4, 16, 32), 4
"""Numbers of rows that are compared, and the one that is timed."""
_SLOTS = 256
_BEFORE = 20
"""Tokens before those of the test."""
_TURNS = 3
"""Passes over the blocks while timing."""
_SHARE = 1.05
"""Share of MLX's time that ours may take.

They spare the host two thirds of the operations, which a test of a few blocks hardly shows: in a
whole pass at 8B it is a tenth.
"""

Pairs = Sequence[tuple[Any, Any]]
"""Blocks with their kernels."""


def compare(pairs: Pairs, products: KernelProbe) -> Steps[KernelProbe]:
    """Compare these blocks for the numbers of rows that our products serve."""
    block, kernels = pairs[0]
    probe = KernelProbe(kernel="block", shape=f"blocks of {type(block).__module__}")
    least, most = products.least_rows, products.most_rows
    timed = min(_TIMED_ROWS, most)
    by_mlx, by_us = (partial(_add, pairs, ours=ours) for ours in (False, True))
    verdict = yield from check(
        f"our kernels for {probe.shape}",
        "block in bfloat16" if kernels.weight.dtype == mx.bfloat16 else "block",
        by_mlx,
        by_us,
        [(rows,) for rows in _ROWS if least <= rows <= most],
        share=_SHARE,
        timed=[_Trial(pairs, timed).trace(ours=ours, chained=True) for ours in (False, True)],
    )
    if not verdict.right:
        return replace(probe, reason=verdict.reason)
    per_block = 1e3 / (_TURNS * len(pairs))
    return replace(
        probe,
        least_rows=least if verdict.faster else 0,
        most_rows=most if verdict.faster else 0,
        reason="" if verdict.faster else "they are slower than MLX's",
        distance=verdict.distance,
        own_ms={timed: per_block * verdict.ours_s},
        mlx_ms={timed: per_block * verdict.usual_s},
    )


def _add(pairs: Pairs, rows: int, *, ours: bool) -> list[mx.array]:
    """Return what each block adds to this number of rows."""
    trial = _Trial(pairs, rows)
    return [after - trial.x for after in trial.trace(ours=ours, chained=False)()]


class _Trial:
    """Passes of `rows` rows through some blocks with random keys and values.

    Args:
        pairs: blocks with their kernels.
        rows: rows per pass.
    """

    def __init__(self, pairs: Pairs, rows: int) -> None:
        self._pairs, self._rows = pairs, rows
        heads, weight = pairs[0][1].heads, pairs[0][1].weight
        keys = iter(mx.random.split(mx.random.key(rows), 2 * len(pairs) + 1))
        self.x = mx.random.normal((1, rows, weight.shape[1]), weight.dtype, key=next(keys))
        shape = (1, heads.kv_heads, _SLOTS, heads.size)
        self._buffers = [
            [mx.random.normal(shape, weight.dtype, key=next(keys)) for _ in range(2)] for _ in pairs
        ]
        self._visible = mx.arange(_SLOTS)[None] <= _BEFORE + mx.arange(rows)[:, None]

    def trace(self, *, ours: bool, chained: bool) -> Callable[[], list[mx.array]]:
        """Trace the blocks, each over the rows or over the result of the previous block."""

        def run(
            x: mx.array, start: mx.array, buffers: list[list[mx.array]], mask: mx.array
        ) -> list[mx.array]:
            batch, found = BatchArrays(x[..., 0], start), list[mx.array]()
            held = [TracedLayer(keys, values, batch) for keys, values in buffers]
            for _ in range(_TURNS if chained else 1):
                for (block, kernels), cache in zip(self._pairs, held, strict=True):
                    with in_trace():
                        found.append((kernels.run if ours else block)(x, mask, cache))
                    x = found[-1] if chained else x
            return found[-1:] if chained else found

        compiled: Callable[..., list[mx.array]] = mx.compile(run)
        return partial(compiled, self.x, mx.array(_BEFORE), self._buffers, self._visible)
