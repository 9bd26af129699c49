"""A target's passes on a CPU with decoder blocks of our own and with MLX's, in turn.

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

from services.mlx.few_rows import blocks  # noqa: E402
from services.mlx.loader import load  # noqa: E402
from services.verifier.target_model import prepare  # noqa: E402

CONTEXT, PASSES, ROWS = 100, 40, (1, 4, 8)


def main() -> None:
    """Print a line for each number of rows."""
    mx.set_default_device(mx.cpu)
    target = prepare(load(Path(sys.argv[1]).expanduser()).module)
    state = target.states.make()
    state.append(CONTEXT, whole=True)
    mx.eval(target.prefill(mx.zeros((1, CONTEXT), mx.int32), cache=state.caches))

    def time_pass(rows: int, most: int) -> float:
        blocks.MOST_ROWS = most
        began = time.perf_counter()
        state.append(rows, whole=True)
        logits = target.verify(mx.arange(rows)[None], cache=state.caches)
        mx.eval(mx.argmax(logits[0], axis=-1))
        took = time.perf_counter() - began
        state.commit(CONTEXT)
        return 1e3 * took

    most = blocks.MOST_ROWS
    for rows in ROWS:
        pairs = [(time_pass(rows, 0), time_pass(rows, most)) for _ in range(PASSES)]
        theirs, ours = (min(times) for times in zip(*pairs, strict=True))
        print(f"{rows} rows: MLX's {theirs:.1f}, ours {ours:.1f}")


if __name__ == "__main__":
    main()
