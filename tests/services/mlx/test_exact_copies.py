"""Copies of weights in less memory: the same products to the bit, or no copy."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from services.mlx import blas
from services.mlx.blas import WeightCopy, WeightKind, pack_exactly
from services.mlx.exact_copies import add_exact_copies, count_read_bytes, large_weights
from services.mlx.loader import to_dense
from tests.support.cpu_kernels import Floats, add_copy, contiguous_product, load_own
from tests.support.reference import for_the_cpu

pytestmark = for_the_cpu


def on_a_grid(n: int, k: int, most: int, *, seed: int = 1) -> Floats:
    """Numbers up to `most` times a step in half precision, and a least weight, for each block."""
    random = np.random.default_rng(seed)
    steps = random.uniform(0.001, 0.02, (n, k // 32, 1)).astype(np.float16).astype(np.float32)
    steps *= random.choice([-1.0, 1.0], steps.shape).astype(np.float32)
    below = random.uniform(1.0, most, steps.shape)
    least = (-steps * below).astype(np.float16).astype(np.float32)
    numbers = random.integers(0, most + 1, (n, k // 32, 32)).astype(np.float32)
    return (numbers * steps + least).reshape(n, k)


def in_sixteen_bits(n: int, k: int, kind: WeightKind) -> Floats:
    """Weights of all sizes, some of them subnormal in half precision, and zeros."""
    random = np.random.default_rng(n)
    weight = random.normal(size=(n, k)).astype(np.float32) * np.exp2(
        random.integers(-20, 3, (n, k))
    )
    weight[0, :3] = 0.0
    if kind is WeightKind.FLOAT16:
        return weight.astype(np.float16).astype(np.float32)
    bits = weight.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def four_rows() -> WeightCopy:
    """A copy of a weight of [4, 32] zeros."""
    steps = np.zeros((4, 1, 2), np.float32)
    return WeightCopy(WeightKind.FOUR_BITS, np.zeros(64, np.uint8), steps)


WEIGHTS: dict[WeightKind, Callable[[int, int], Floats]] = {
    WeightKind.FOUR_BITS: lambda n, k: on_a_grid(n, k, 15),
    WeightKind.EIGHT_BITS: lambda n, k: on_a_grid(n, k, 255),
    WeightKind.BFLOAT16: lambda n, k: in_sixteen_bits(n, k, WeightKind.BFLOAT16),
    WeightKind.FLOAT16: lambda n, k: in_sixteen_bits(n, k, WeightKind.FLOAT16),
}


@pytest.fixture(params=["avx2", "avx512"])
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> ctypes.CDLL:
    """The kernels with a state of their own, for each set of instructions that is here."""
    own = load_own(tmp_path)
    if request.param == "avx2":
        own.small_gemm_choose_tiles(0)
    elif "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512")
    return own


@pytest.mark.parametrize("kind", WEIGHTS)
def test_products_stay_the_same_to_the_bit(kernel: ctypes.CDLL, kind: WeightKind) -> None:
    """For every number of rows, and columns and depths of many sizes."""
    for n, k in ((1, 32), (7, 96), (101, 64), (300, 576)):
        x = np.random.default_rng(k).normal(size=(16, k)).astype(np.float32)
        w = WEIGHTS[kind](n, k)
        expected = [contiguous_product(kernel, x[:rows], w) for rows in range(1, 17)]
        copy = pack_exactly(w, kind)
        assert copy is not None
        assert add_copy(kernel, w, copy)
        w[:] = np.nan  # nobody reads it any more
        for rows in range(1, 17):
            np.testing.assert_array_equal(
                contiguous_product(kernel, x[:rows], w), expected[rows - 1]
            )


@pytest.mark.parametrize("kind", WEIGHTS)
def test_one_weight_that_would_change_forbids_the_copy(kind: WeightKind) -> None:
    """By the least that a float can, and values that the others do not go with."""
    beyond = () if kind is WeightKind.BFLOAT16 else (np.inf, -np.inf, np.nan, 3e38)
    for value in (None, *beyond):
        w = WEIGHTS[kind](40, 96)
        w[37, 70] = np.nextafter(w[37, 70], np.float32(9.0)) if value is None else value
        assert pack_exactly(w, kind) is None


@pytest.mark.parametrize("kind", [WeightKind.FOUR_BITS, WeightKind.EIGHT_BITS])
def test_a_number_more_is_too_many(kind: WeightKind) -> None:
    """Of the numbers that so many bits can tell apart."""
    most = 15 if kind is WeightKind.FOUR_BITS else 255
    w = np.zeros((2, 32), np.float32)
    w[1, :3] = 0.0, most, 1.0
    assert pack_exactly(w, kind) is not None
    w[1, 1] += 1.0
    assert pack_exactly(w, kind) is None


@pytest.mark.parametrize("kind", WEIGHTS)
def test_simple_blocks_have_copies(kind: WeightKind) -> None:
    """All alike, all zero, of either zero."""
    w = np.zeros((3, 64), np.float32)
    w[0], w[1, ::2] = 0.75, -0.0
    assert pack_exactly(w, kind) is not None


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("k", [8, 33, 48])
def test_rows_that_are_no_whole_blocks_have_none(kind: WeightKind, k: int) -> None:
    """They go on as floats."""
    assert pack_exactly(np.zeros((4, k), np.float32), kind) is None


def test_what_lies_apart_has_none() -> None:
    """Every other row, say: the kernels know weights by where they begin."""
    w = np.zeros((8, 32), np.float32)
    assert pack_exactly(w[::2], WeightKind.FOUR_BITS) is None
    packed = WeightCopy(
        WeightKind.FOUR_BITS, np.zeros(64, np.uint8), np.zeros((4, 1, 2), np.float32)
    )
    assert not blas.add_copy(w[::2], packed)


class _Model(nn.Module):
    """A linear layer, and one that is too small to matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 512, bias=False)
        self.small = nn.Linear(32, 32)


def _is_large(_: str, layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and layer.weight.size > 65536


PUBLISHED: list[tuple[str, int | None, int]] = [
    ("bfloat16", None, 0),
    ("float16", None, 0),
    *(("bfloat16", bits, group_size) for bits in (4, 8) for group_size in (32, 64, 128)),
]


@pytest.mark.parametrize(("dtype", "bits", "group_size"), PUBLISHED)
def test_a_published_model_is_read_from_copies(
    dtype: str, bits: int | None, group_size: int
) -> None:
    """Its layers compute what they did, with less memory to read."""
    model = _Model()
    model.set_dtype(getattr(mx, dtype))
    if bits is not None:
        nn.quantize(model, group_size=group_size, bits=bits, class_predicate=_is_large)
    to_dense(model, mx.float32)
    x = mx.random.normal((16, 256))
    before = [model.layer(x[:rows]) for rows in range(1, 17)]
    mx.eval(before)
    floats = count_read_bytes(model)
    assert add_exact_copies(model) == 1
    share = 0.2 if bits == 4 else 0.32 if bits == 8 else 0.5
    assert floats // 8 < count_read_bytes(model) < floats * share + 5000
    for rows, expected in enumerate(before, 1):
        assert mx.array_equal(model.layer(x[:rows]), expected)


def test_random_floats_have_no_copy() -> None:
    """There is nothing to leave out of them."""
    model = _Model()
    before = model.layer(mx.ones((3, 256)))
    assert [weight.shape for weight in large_weights(model)] == [(512, 256)]
    assert add_exact_copies(model) == 0
    assert mx.array_equal(model.layer(mx.ones((3, 256))), before)


def test_without_kernels_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX multiplies with the floats."""
    monkeypatch.setattr(blas._Loaded, "kernels", None)
    w = np.zeros((4, 32), np.float32)
    assert pack_exactly(w, WeightKind.FOUR_BITS) is None
    packed = WeightCopy(
        WeightKind.FOUR_BITS, np.zeros(64, np.uint8), np.zeros((4, 1, 2), np.float32)
    )
    assert not blas.add_copy(w, packed)
