"""Heads taken apart, normed and rotated on CUDA: the kernel's source run on the host."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.kernels.cuda.rotate import HeadNorm, Heads, rotate
from tests.services.kernels.cuda.host import compile_kernel, run_kernel

SIZE = 80


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("kernel") / "rotate"
    return compile_kernel("rotate_host.cpp", program, HEAD_SIZE=SIZE)


@pytest.mark.parametrize("rotated", [SIZE, 32])
@pytest.mark.parametrize("normed", [False, True])
def test_is_mlx_s_rotation(kernel: Path, rotated: int, *, normed: bool) -> None:
    """Of a whole head, and of a part of one; behind a norm and without."""
    random = np.random.default_rng(2)
    head, gains = random.normal(size=(2, SIZE)).astype(np.float32)
    speeds = 100.0 ** (-np.arange(0, rotated, 2) / rotated)
    found = run_kernel(kernel, rotated, 41, 1e-5, int(normed), gains, speeds, head)
    x = mx.array(head)[None, None, None]
    if normed:
        x = mx.fast.rms_norm(x, mx.array(gains), 1e-5)
    expected = mx.fast.rope(x, rotated, traditional=False, base=100.0, scale=1.0, offset=41)
    np.testing.assert_allclose(found, np.array(expected).ravel(), atol=1e-4)


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_kernel_takes_rows_apart(rows: int, *, normed: bool) -> None:
    size, heads, kv_heads = 64, 6, 2
    x = mx.random.normal((1, rows, (heads + 2 * kv_heads) * size), mx.float16)
    gains = mx.random.normal((2, size), mx.float16)
    speeds = mx.power(mx.array(1e4), -mx.arange(0, size, 2) / size)
    norm = HeadNorm(gains, 1e-5) if normed else None
    layer = Heads(heads, kv_heads, size, size, speeds, norm)
    places = [30 + (at + 1) // 2 for at in range(rows)]
    parts = x.reshape(1, rows, -1, size).swapaxes(1, 2)
    expected: Any = mx.split(parts, [heads, heads + kv_heads], axis=1)
    for at in range(2):
        if normed:
            expected[at] = mx.fast.rms_norm(expected[at], gains[at], 1e-5)
        turned = [
            mx.fast.rope(
                expected[at][:, :, row : row + 1],
                size,
                traditional=False,
                base=1e4,
                scale=1.0,
                offset=place,
            )
            for row, place in enumerate(places)
        ]
        expected[at] = mx.concatenate(turned, axis=2)
    for ours, by_mlx in zip(rotate(x, mx.array(places), layer), expected, strict=True):
        assert ours.shape == by_mlx.shape
        np.testing.assert_allclose(
            np.array(ours.astype(mx.float32)), np.array(by_mlx.astype(mx.float32)), atol=0.02
        )
