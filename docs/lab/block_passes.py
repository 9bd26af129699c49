"""A target's passes on a CPU in one call, block by block, and with MLX's blocks, in turn.

    python docs/lab/block_passes.py MODEL CORES

Milliseconds of a pass behind 100 tokens, its best tokens included; the least of forty.
"""

import os
import sys
import time
from pathlib import Path

from services.mlx.blas import load_blas

CORES = int(sys.argv[2])
os.sched_setaffinity(0, set(range(CORES)))
load_blas(CORES)

import mlx.core as mx  # noqa: E402  # behind the BLAS

from services.mlx.few_rows import blocks, passes  # noqa: E402
from services.mlx.loader import load  # noqa: E402
from services.verifier.target_model import prepare  # noqa: E402

CONTEXT, PASSES, ROWS = 100, 40, (1, 4, 8)


def main() -> None:
    """Print a line for each number of rows."""
    mx.set_default_device(mx.cpu)
    target = prepare(load(Path(sys.argv[1]).expanduser()).module)
    most = blocks.MOST_ROWS
    ways = ((0, 0), (most, 0), (most, most))
    # One each: buffers that a call writes to are its own.
    states = {way: target.states.make() for way in ways}
    for state in states.values():
        state.append(CONTEXT, whole=True)
        mx.eval(target.prefill(mx.zeros((1, CONTEXT), mx.int32), cache=state.caches))

    def time_pass(rows: int, way: tuple[int, int]) -> float:
        blocks.MOST_ROWS, passes.MOST_ROWS = way
        state = states[way]
        began = time.perf_counter()
        state.append(rows, whole=True)
        logits = target.verify(mx.arange(rows)[None], cache=state.caches)
        mx.eval(mx.argmax(logits[0], axis=-1))
        took = time.perf_counter() - began
        state.commit(CONTEXT)
        return 1e3 * took

    for rows in ROWS:
        found = [[time_pass(rows, way) for way in ways] for _ in range(PASSES)]
        theirs, ours, whole = (min(times) for times in zip(*found, strict=True))
        print(f"{rows} rows: MLX's {theirs:.1f}, block by block {ours:.1f}, one call {whole:.1f}")


if __name__ == "__main__":
    main()
