"""Self-test of decoder blocks: are ours correct, and faster than MLX's with our products?"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from protocol.jobs.kernel_report import KernelProbe
from services.kernels.cuda.choice import in_trace
from services.kv.slots import BUCKET
from services.mlx.tracing.trace_trial import measure_distance, time_in_turn
from services.mlx.tracing.traced_slots import LayerInputs, PassRows
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)

BLOCKS = 4
"""Number of blocks tested."""
_TOLERANCES = {mx.float16: 0.01, mx.bfloat16: 0.04}
"""Relative tolerance of a block's addition to its input.

MLX rounds each step of a gate, our kernel only its end.
"""
_ROWS, _TIMED_ROWS = (1, 4, 16, 32), 4
"""Numbers of rows that are compared, and the one that is timed."""
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
    dtype, distance = kernels.weight.dtype, 0.0
    for rows in _ROWS:
        if not products.least_rows <= rows <= products.most_rows:
            continue
        trial = _Trial(pairs, rows)
        try:
            distance = max(distance, trial.measure_distance())
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            return _refuse(probe, f"of {rows} rows they do not run here: {error}")
        if not distance < _TOLERANCES.get(dtype, min(_TOLERANCES.values())):
            return _refuse(probe, f"of {rows} rows they are {distance:.2g} from MLX's")
        yield
    timed = min(_TIMED_ROWS, products.most_rows)
    own_s, mlx_s = yield from _Trial(pairs, timed).time()
    faster = own_s < _SHARE * mlx_s
    _log.info("a block: %.3f ms by our kernels, %.3f ms by MLX", 1e3 * own_s, 1e3 * mlx_s)
    return replace(
        probe,
        least_rows=products.least_rows if faster else 0,
        most_rows=products.most_rows if faster else 0,
        reason="" if faster else "they are slower than MLX's",
        distance=distance,
        own_ms={timed: 1e3 * own_s},
        mlx_ms={timed: 1e3 * mlx_s},
    )


def _refuse(probe: KernelProbe, reason: str) -> KernelProbe:
    _log.warning("our kernels for blocks: %s", reason)
    return replace(probe, reason=reason)


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
        self._x = mx.random.normal((1, rows, weight.shape[1]), weight.dtype, key=next(keys))
        shape = (1, heads.kv_heads, BUCKET, heads.size)
        self._buffers = [
            [mx.random.normal(shape, weight.dtype, key=next(keys)) for _ in range(2)] for _ in pairs
        ]
        self._visible = mx.arange(BUCKET)[None] <= _BEFORE + mx.arange(rows)[:, None]

    def measure_distance(self) -> float:
        """Return the largest distance of what our kernels add to the rows, over all blocks."""
        results = [self._trace(ours=ours, chained=False)() for ours in (False, True)]
        return max(
            measure_distance(by_mlx - self._x, by_us - self._x)
            for by_mlx, by_us in zip(*results, strict=True)
        )

    def time(self) -> Steps[list[float]]:
        """Return the seconds per block by our kernels and by MLX, run alternately."""
        ways = [self._trace(ours=ours, chained=True) for ours in (True, False)]
        count = _TURNS * len(self._pairs)
        return [seconds / count for seconds in (yield from time_in_turn(ways))]

    def _trace(self, *, ours: bool, chained: bool) -> Callable[[], list[mx.array]]:
        """Trace the blocks, each over the rows or over the result of the previous block."""

        def run(
            x: mx.array, start: mx.array, buffers: list[list[mx.array]], mask: mx.array
        ) -> list[mx.array]:
            rows, found = PassRows(start, self._rows), list[mx.array]()
            held = [LayerInputs(keys, values, rows) for keys, values in buffers]
            for _ in range(_TURNS if chained else 1):
                for (block, kernels), cache in zip(self._pairs, held, strict=True):
                    with in_trace():
                        found.append((kernels.run if ours else block)(x, mask, cache))
                    x = found[-1] if chained else x
            return found[-1:] if chained else found

        compiled: Callable[..., list[mx.array]] = mx.compile(run)
        return partial(compiled, self._x, mx.array(_BEFORE), self._buffers, self._visible)
