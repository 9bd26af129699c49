"""Measure how fast this process reads weights, the bound on passes of few tokens."""

import time

import mlx.core as mx

from services.mlx.loader import compute_unit

_COLUMNS, _CPU_ROWS, _GPU_ROWS = 4096, 8192, 65536
"""A matrix of 134 MB in float32, or of 537 MB in half precision."""
_PASSES = 8


def measure_reading() -> float:
    """Return bytes per second, the best of a few passes: other load only slows them down."""
    on_cpu = compute_unit() == "cpu"
    dtype, rows = (mx.float32, _CPU_ROWS) if on_cpu else (mx.float16, _GPU_ROWS)
    matrix = mx.random.normal((rows, _COLUMNS)).astype(dtype)
    vector = mx.ones((1, _COLUMNS), dtype=dtype)
    mx.eval(matrix, vector)
    best_s = float("inf")
    for _ in range(_PASSES):
        began = time.perf_counter()
        mx.eval(vector @ matrix.T)
        best_s = min(best_s, time.perf_counter() - began)
    return float(matrix.nbytes) / best_s
