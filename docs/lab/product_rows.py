"""Products of a few rows on CUDA: our kernel and MLX's, by shape and rows.

    PYTHONPATH=. python docs/lab/product_rows.py [--shapes 6144x4096,4096x4096] [--rows 1,4,8]

Each line has microseconds of one product, and the terabytes of weights that it reads in a second,
by MLX and by our kernel. The weights of four gigabytes are read in turn, from a trace, so that none
are in a cache; medians of interleaved rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from services.kernels.cuda import product

ROUNDS = 7
MEMORY = 1 << 32
SHAPES = "6144x4096,4096x4096,28672x4096,4096x14336,128256x4096,960x576,576x1536,49152x576"

Product = Callable[[mx.array, mx.array], mx.array]


def by_mlx(x: mx.array, weight: mx.array) -> mx.array:
    """[rows, outputs]."""
    return x @ weight.T


def trace(multiply: Product) -> Callable[[mx.array, list[mx.array]], list[mx.array]]:
    """One product after the other."""

    def run(x: mx.array, weights: list[mx.array]) -> list[mx.array]:
        return [multiply(x, weight) for weight in weights]

    compiled: Callable[[mx.array, list[mx.array]], list[mx.array]] = mx.compile(run)
    return compiled


def measure(outputs: int, inputs: int, rows: list[int]) -> None:
    """A line for each number of rows."""
    count = max(2, min(256, MEMORY // (2 * outputs * inputs)))
    weights = [mx.random.normal((outputs, inputs), mx.float16) * 0.05 for _ in range(count)]
    mx.eval(weights)
    ways: dict[str, Any] = {"MLX": trace(by_mlx), "ours": trace(product.multiply)}
    for number in rows:
        x = mx.random.normal((number, inputs), mx.float16)
        expected = (x @ weights[0].T).astype(mx.float32)
        times: dict[str, list[float]] = {name: [] for name in ways}
        worst = 0.0
        for way in ways.values():
            found: Any = mx.linalg.norm(way(x, weights)[0].astype(mx.float32) - expected)
            worst = max(worst, float(found / mx.linalg.norm(expected)))
        for _ in range(ROUNDS):
            for name, way in ways.items():
                began = time.perf_counter()
                mx.eval(way(x, weights))
                times[name].append((time.perf_counter() - began) / count)
        line = [f"{outputs}x{inputs} {number:3} rows"]
        for name, own in times.items():
            median = statistics.median(own)
            line.append(f"{name} {1e6 * median:.1f} ({2e-12 * outputs * inputs / median:.2f})")
        print(", ".join(line), f"off by {worst:.1g}", flush=True)


def main() -> None:
    """Print a line for each shape and number of rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    given = parser.parse_args()
    rows = [*map(int, given.rows.split(","))]
    for shape in given.shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        measure(outputs, inputs, rows)


if __name__ == "__main__":
    main()
