"""The noise: one pure function in every array library, and a distribution."""

from collections.abc import Callable
from math import pi, sqrt

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.gumbel import (
    ACCEPT,
    BONUS,
    DRAFT,
    gumbel,
    gumbel_from_bits,
    hash_bits,
    uniform,
)

Bits = npt.NDArray[np.uint32]

SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4)
IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)

EULER_GAMMA = 0.5772156649015329


def row(ids: list[int]) -> Bits:
    return np.array([ids], dtype=np.uint32)


def one(seed: int, position: int, token: int) -> int:
    """The hash as its documentation tells it, in Python's own integers."""

    def splitmix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    def fmix32(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first output of seed 0
    key = splitmix64(splitmix64(seed) ^ position)
    return fmix32((fmix32(token ^ (key % 2**32)) + (key >> 32)) % 2**32)


@given(SEEDS, POSITIONS, IDS)
def test_hash_is_the_documented_one(seed: int, positions: list[int], ids: list[int]) -> None:
    """The bits are two rounds of MurmurHash3's finaliser, keyed by SplitMix64."""
    expected = [[one(seed, position, token) for token in ids] for position in positions]
    assert expected == hash_bits(np, seed, positions, row(ids)).tolist()


def test_hash_never_changes() -> None:
    """A seed gives the same answer in every version of this project."""
    expected = [[1158224833, 640725704, 3545623504]]
    assert expected == hash_bits(np, 42, [1000], row([0, 1, 49151])).tolist()


@given(SEEDS, POSITIONS, IDS)
def test_libraries_agree_on_the_bits(seed: int, positions: list[int], ids: list[int]) -> None:
    """MLX computes the same bits as numpy."""
    expected = hash_bits(np, seed, positions, row(ids)).tolist()
    assert expected == hash_bits(mx, seed, positions, mx.array(row(ids))).tolist()


@given(SEEDS, POSITIONS, IDS)
def test_libraries_agree_on_the_noise(seed: int, positions: list[int], ids: list[int]) -> None:
    """MLX computes the same Gumbel noise as numpy, up to float32 rounding."""
    expected = gumbel(np, seed, positions, row(ids))
    actual = np.array(gumbel(mx, seed, positions, mx.array(row(ids))))
    assert expected.dtype == actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


@given(SEEDS, st.integers(0, 2**32 - 1), IDS)
def test_noise_of_a_token_is_its_own(seed: int, position: int, ids: list[int]) -> None:
    """A token's noise does not depend on which other tokens or positions are asked for."""
    several = gumbel(np, seed, [position + 1, position], np.array([ids, ids], dtype=np.uint32))
    alone = [float(gumbel(np, seed, [position], row([token]))[0, 0]) for token in ids]
    assert alone == several[1].tolist()


def test_rows_may_ask_for_different_tokens() -> None:
    """Each row of ids meets its own position."""
    ids = np.array([[5, 6], [7, 8]], dtype=np.uint32)
    expected = [hash_bits(np, 3, [9], row([5, 6]))[0].tolist(), [one(3, 10, 7), one(3, 10, 8)]]
    assert expected == hash_bits(np, 3, [9, 10], ids).tolist()


def test_noise_is_finite_and_falls_with_the_bits() -> None:
    """The smallest hash gives the largest noise, and no hash gives an infinite one."""
    bits = np.array([0, 1, 2, 1000, 2**31, 2**32 - 1000, 2**32 - 1], dtype=np.uint32)
    noise = gumbel_from_bits(np, bits)
    assert np.isfinite(noise).all()
    assert noise.tolist() == sorted(noise.tolist(), reverse=True)
    assert noise[0] == pytest.approx(np.log(2.0**33), abs=1e-3)


def by_token(seed: int) -> npt.NDArray[np.float32]:
    return gumbel(np, seed, [77], np.arange(100_000, dtype=np.uint32)[None])[0]


def by_position(seed: int) -> npt.NDArray[np.float32]:
    return gumbel(np, seed, range(20_000), row([1, 2, 3, 4, 5])).T.ravel()


def by_seed(seed: int) -> npt.NDArray[np.float32]:
    many = [gumbel(np, seed + s, [3], row(list(range(100))))[0] for s in range(500)]
    return np.concatenate(many)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize("draw", [by_token, by_position, by_seed])
def test_noise_is_standard_gumbel(
    draw: Callable[[int], npt.NDArray[np.float32]], seed: int
) -> None:
    """Mean, variance and Kolmogorov-Smirnov distance are the standard Gumbel distribution's."""
    noise = np.sort(draw(seed).astype(np.float64))
    n = noise.size
    assert noise.mean() == pytest.approx(EULER_GAMMA, abs=4 * sqrt(pi**2 / 6 / n))
    assert noise.var() == pytest.approx(pi**2 / 6, abs=4 * sqrt(4.4 * (pi**2 / 6) ** 2 / n))
    distribution = np.exp(-np.exp(-noise))
    steps = np.arange(n + 1) / n
    distance = max(np.abs(distribution - steps[1:]).max(), np.abs(distribution - steps[:-1]).max())
    assert distance < 1.95 / sqrt(n)  # one in a thousand


def pairs_of_tokens(seed: int) -> tuple[Bits, Bits]:
    bits = hash_bits(np, seed, range(400), np.arange(1000, dtype=np.uint32)[None])
    return bits[:, 0::2].ravel(), bits[:, 1::2].ravel()


def pairs_of_positions(seed: int) -> tuple[Bits, Bits]:
    bits = hash_bits(np, seed, range(1000), np.arange(400, dtype=np.uint32)[None])
    return bits[0::2].ravel(), bits[1::2].ravel()


def pairs_of_seeds(seed: int) -> tuple[Bits, Bits]:
    ids = np.arange(400, dtype=np.uint32)[None]
    first, second = hash_bits(np, seed, range(500), ids), hash_bits(np, seed + 1, range(500), ids)
    return first.ravel(), second.ravel()


def pairs_of_diagonals(seed: int) -> tuple[Bits, Bits]:
    bits = hash_bits(np, seed, range(1000), np.arange(401, dtype=np.uint32)[None])
    return bits[0::2, :-1].ravel(), bits[1::2, 1:].ravel()


@pytest.mark.parametrize("seed", [0, 12345])
@pytest.mark.parametrize("shift", [28, 0], ids=["high bits", "low bits"])
@pytest.mark.parametrize(
    "draw", [pairs_of_tokens, pairs_of_positions, pairs_of_seeds, pairs_of_diagonals]
)
def test_neighbours_are_independent(
    draw: Callable[[int], tuple[Bits, Bits]], shift: int, seed: int
) -> None:
    """Adjacent tokens, positions and seeds fill all pairs of sixteenths evenly (chi-square)."""
    first, second = draw(seed)
    cells = ((first >> shift) & 15) * 16 + ((second >> shift) & 15)
    counts = np.bincount(cells, minlength=256)
    expected = first.size / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 4 * sqrt(2 * 255)


Pair = tuple[list[float], list[float]]


def draft_and_accept(seed: int) -> Pair:
    return at_positions(seed, DRAFT, 5), at_positions(seed, ACCEPT)


def draft_and_bonus(seed: int) -> Pair:
    return at_positions(seed, DRAFT, 0), at_positions(seed, BONUS)


def accept_and_bonus(seed: int) -> Pair:
    return at_positions(seed, ACCEPT), at_positions(seed, BONUS)


def two_rounds(seed: int) -> Pair:
    return at_positions(seed, DRAFT, 5), at_positions(seed, DRAFT, 6)


def two_positions(seed: int) -> Pair:
    return at_positions(seed, DRAFT, 5)[1:], at_positions(seed, DRAFT, 5)[:-1]


def bonus_and_next_accept(seed: int) -> Pair:
    return at_positions(seed, ACCEPT)[1:], at_positions(seed, BONUS)[:-1]


def two_seeds(seed: int) -> Pair:
    return at_positions(seed, BONUS), at_positions(seed + 1, BONUS)


def draft_and_noise(seed: int) -> Pair:
    bits = hash_bits(np, seed, range(20_000), row([0]))[:, 0] / 2.0**32
    return at_positions(seed, DRAFT, 0), bits.tolist()


def at_positions(seed: int, stream: int, *counters: int) -> list[float]:
    return [uniform(seed, stream, *counters, position) for position in range(20_000)]


@pytest.mark.parametrize(
    "draw",
    [
        draft_and_accept,
        draft_and_bonus,
        accept_and_bonus,
        two_rounds,
        two_positions,
        bonus_and_next_accept,
        two_seeds,
        draft_and_noise,
    ],
)
def test_uniform_streams_are_independent(draw: Callable[[int], Pair]) -> None:
    """Streams, rounds, positions and seeds fill all pairs of sixteenths evenly (chi-square)."""
    first, second = (np.array(numbers) for numbers in draw(7))
    cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
    counts = np.bincount(cells, minlength=256)
    expected = first.size / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 4 * sqrt(2 * 255)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / sqrt(first.size)


@given(SEEDS, st.integers(0, 2**63), st.integers(0, 2**31))
def test_uniform_numbers_are_inside(seed: int, number: int, position: int) -> None:
    """Neither 0 nor 1 is ever drawn, and the same counters give the same number."""
    drawn = uniform(seed, DRAFT, number, position)
    assert 0.0 < drawn < 1.0
    assert drawn == uniform(seed, DRAFT, number, position)


def test_uniform_numbers_never_change() -> None:
    """A seed gives the same answer in every version of this project."""
    expected = [0.6949764487256264, 0.9524603521526022, 0.674054201444254]
    assert expected == [uniform(42, DRAFT, 3, 9), uniform(42, ACCEPT, 9), uniform(42, BONUS, 9)]
