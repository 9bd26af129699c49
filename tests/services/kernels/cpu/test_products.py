"""Products from packed bits: right, and the same bits in any company and instruction set."""

import ctypes
import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from services.kernels.cpu.library import address, cpu_kernels, use_spare_cores
from services.kernels.cpu.packing import MlxWeights, PackedMatrix, pack
from services.kernels.cpu.program import SETS, find_program, multiply, read_rows

Floats = npt.NDArray[np.float32]

pytestmark = pytest.mark.skipif(find_program() is None, reason="there is no C compiler here")

BITS, GROUPS = (0, 2, 3, 4, 5, 6, 8), (32, 64, 128)
SHARED = 5
"""As in `c/layout.h`."""
TYPES = (mx.float16, mx.bfloat16, mx.float32)
RANDOM = np.random.default_rng(1)


def weights(
    outputs: int, inputs: int, bits: int, group: int, dtype: mx.Dtype
) -> tuple[MlxWeights, Floats]:
    """Random weights of a kind, and the floats that they stand for."""
    floats = mx.array(RANDOM.standard_normal((outputs, inputs)).astype(np.float32))
    if not bits:
        found = floats.astype(dtype)
        return MlxWeights(found), np.array(found.astype(mx.float32))
    codes, scales, biases = mx.quantize(floats, group_size=group, bits=bits)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    dense = mx.dequantize(
        codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits
    )
    return MlxWeights(codes, scales, biases, bits, group), np.array(dense)


def programs() -> dict[str, ctypes.c_void_p]:
    found = {name: find_program(name) for name in SETS}
    return {name: program for name, program in found.items() if program is not None}


def keep_halves(program: ctypes.c_void_p, floats: Floats) -> npt.NDArray[np.float16]:
    """As keys and values are kept."""
    library: Any = cpu_kernels()
    halves = np.empty(floats.shape, np.float16)
    library.cpu_keep_halves(program, floats.size, address(floats), address(halves))
    return halves


def rounded(x: Floats) -> Any:
    """Activations as they are multiplied: in steps of a 127th of the largest of each 32."""
    groups = x.reshape(len(x), -1, 32)
    steps = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    return (np.rint(groups / np.where(steps > 0, steps, 1)) * steps).reshape(x.shape)


def random_cases() -> list[tuple[PackedMatrix, Floats, Floats, int]]:
    """For each kind of weights a packed matrix, its floats, rows of activations, and its bits."""
    found = []
    for bits, group, dtype in itertools.product(BITS, GROUPS, TYPES):
        outputs, inputs = int(RANDOM.integers(1, 70)), 128 * int(RANDOM.integers(1, 4))
        given, dense = weights(outputs, inputs, bits, group, dtype)
        x = RANDOM.standard_normal((int(RANDOM.integers(1, 20)), inputs)).astype(np.float32)
        x[0, :32] = 0
        found.append((pack(given), dense, x, bits))
    for bits in (4, 5):
        given, dense = like_k_quants(int(RANDOM.integers(1, 40)), 512, bits)
        x = RANDOM.standard_normal((int(RANDOM.integers(1, 20)), 512)).astype(np.float32)
        packed = pack(given)
        assert packed.matrix.scales == SHARED
        found.append((packed, dense, x, bits))
    return found


def like_k_quants(outputs: int, inputs: int, bits: int) -> tuple[MlxWeights, Floats]:
    """Weights whose scales are products of six bits and a half, tiny ones among them."""
    given, _ = weights(outputs, inputs, bits, 32, mx.float32)
    shape = (outputs, inputs // 256, 8)
    halves = (RANDOM.standard_normal((2, *shape[:2], 1)) * 1e-4).astype(np.float16)
    steps = RANDOM.integers(0, 64, (2, *shape)).astype(np.float32)
    factors = (halves.astype(np.float32) * steps).reshape(2, outputs, -1)
    scales, biases = mx.array(factors[0]), mx.array(factors[1])
    dense = mx.dequantize(given.weight, scales, biases, group_size=32, bits=bits)
    return given._replace(scales=scales, biases=biases), np.array(dense)


def test_products_are_those_of_the_weights_in_the_file() -> None:
    """Of floats to rounding, and of bytes those of the rounded activations; rows are read back."""
    program = find_program()
    assert program is not None
    for packed, dense, x, bits in random_cases():
        np.testing.assert_allclose(
            read_rows(program, packed, range(len(dense))), dense, rtol=1e-6, atol=1e-6
        )
        for rounds in (False, True):
            given = rounded(x) if rounds and bits else x
            expected = given.astype(np.float64) @ dense.T.astype(np.float64)
            found = multiply(program, packed, x, rounds=rounds)
            distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
            assert distance < 1e-5, (bits, rounds)


def test_all_instruction_sets_and_companies_give_the_same_bits() -> None:
    """A row's products do not depend on the processor, on other rows, or on helping threads."""
    for packed, _, x, bits in random_cases():
        for rounds in (False, True):
            every = {
                name: multiply(program, packed, x, rounds=rounds)
                for name, program in programs().items()
            }
            expected = every["portable"]
            fastest = find_program()
            assert fastest is not None
            alone = [
                multiply(fastest, packed, x[at : at + 1], rounds=rounds) for at in range(len(x))
            ]
            use_spare_cores((0, 0))
            every["helped"] = multiply(fastest, packed, x, rounds=rounds)
            use_spare_cores(())
            for name, found in {**every, "alone": np.concatenate(alone)}.items():
                assert np.array_equal(found, expected), (name, bits, rounds)


def test_halves_are_those_of_ieee_in_all_instruction_sets() -> None:
    """Every half as a float, and back; between two of them the nearer one, or the even one."""
    bits = np.arange(65536, dtype=np.uint16).reshape(512, 128)
    halves = bits.view(np.float16)
    steps = np.sort(halves[np.isfinite(halves)].astype(np.float32))
    between = (steps[1:] + steps[:-1]) / 2  # exact: ties
    below, above = np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(np.inf))
    far = np.array([1e-45, -1e-39, 65519.9, 65520, -65520, 3e38], np.float32)
    floats = np.concatenate([halves.astype(np.float32).ravel(), between, below, above, far])
    with np.errstate(over="ignore"):
        expected = floats.astype(np.float16)
    expected[np.isinf(expected)] = np.nan  # what no half can hold
    numbers = ~np.isnan(expected)
    packed = pack(MlxWeights(mx.array(halves)))
    kept, read = set(), set()
    for name, program in programs().items():
        back, rows = keep_halves(program, floats), read_rows(program, packed, range(512))
        assert np.isnan(back[~numbers]).all(), name
        assert np.array_equal(back[numbers].view(np.uint16), expected[numbers].view(np.uint16))
        assert np.array_equal(rows, halves.astype(np.float32), equal_nan=True), name
        kept.add(back.tobytes())
        read.add(rows.tobytes())
    assert len(kept) == len(read) == 1


def test_what_is_no_number_spreads_to_its_row_alone() -> None:
    """NaN and infinite activations make their row's products NaN; NaN scales their channel's."""
    given, _ = weights(20, 64, 4, 32, mx.float32)
    for program in programs().values():
        for bad in (np.nan, np.inf):
            x = np.ones((3, 64), np.float32)
            x[1, 5] = bad
            found = multiply(program, pack(given), x, rounds=True)
            assert np.isnan(found[1]).all()
            assert np.isfinite(found[[0, 2]]).all()
    assert given.scales is not None
    scales = np.array(given.scales)
    scales[7, 0] = np.nan
    packed = pack(given._replace(scales=mx.array(scales)))
    found = multiply(program, packed, np.ones((1, 64), np.float32), rounds=True)
    assert np.flatnonzero(np.isnan(found[0])).tolist() == [7]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("stored", "bits"), [(0, 8), (0, 4), (5, 4), (6, 4), (8, 4)])
def test_weights_of_more_bits_can_be_rounded(stored: int, bits: int, dtype: mx.Dtype) -> None:
    """To the nearest step between the smallest and the largest of 32."""
    program = find_program()
    assert program is not None
    for group in GROUPS[: None if stored else 1]:
        given, floats = weights(40, 256, stored, group, dtype)
        packed = pack(given, bits=bits)
        assert packed.nbytes == 48 * 256 * (bits + 1) // 8
        groups = floats.reshape(40, -1, 32)
        steps = np.ptp(groups, axis=-1) / (2**bits - 1)
        found = read_rows(program, packed, range(40)).reshape(groups.shape)
        largest = np.abs(groups).max(-1)
        assert (np.abs(found - groups).max(-1) < 0.5 * steps + 0.001 * largest).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_none_when_rounded(bad: float) -> None:
    """Requests report it; other groups are as they were."""
    program = find_program()
    assert program is not None
    floats = RANDOM.standard_normal((16, 64)).astype(np.float32)
    floats[3, 37] = bad
    rows = read_rows(program, pack(MlxWeights(mx.array(floats)), bits=4), range(16))
    assert np.isnan(rows[3, 32:]).all()
    rows[3, 32:] = 0
    assert np.isfinite(rows).all()


@pytest.mark.parametrize(("stored", "bits"), [(4, 4), (3, 4), (4, 8), (8, 8)])
def test_weights_of_fewer_bits_stay(stored: int, bits: int) -> None:
    """As in the file."""
    program = find_program()
    assert program is not None
    given, floats = weights(16, 64, stored, 32, mx.float32)
    packed = pack(given, bits=bits)
    assert packed.nbytes == pack(given).nbytes
    np.testing.assert_allclose(read_rows(program, packed, range(16)), floats, rtol=1e-5, atol=1e-6)
