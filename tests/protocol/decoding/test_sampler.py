"""The distribution of the chosen token: exactly that of the filtered, tempered logits."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protocol.decoding.gumbel import gumbel
from protocol.decoding.sampler import (
    filter_tokens,
    has_filter,
    sample,
    score_candidates,
    score_margin,
)
from protocol.messages import Sampling
from tests.properties import examples

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


def softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


def allowed(row: Floats, sampling: Sampling) -> Mask:
    """What mlx-lm's sampler leaves over: top-p, min-p, top-k, each on what the last one left."""
    distribution = softmax(row)
    keep = np.ones(row.size, dtype=bool)
    if sampling.top_p < 1.0:
        order = np.argsort(-distribution)
        mass_above = np.cumsum(distribution[order]) - distribution[order]
        keep[order[mass_above >= sampling.top_p]] = False
    if sampling.min_p > 0.0:
        keep &= distribution >= sampling.min_p * distribution.max()
    if 0 < sampling.top_k < keep.sum():
        keep &= distribution >= np.sort(distribution[keep])[-sampling.top_k]
    return keep


def borderline(row: Floats, sampling: Sampling) -> bool:
    """Whether rounding, or an order among equals, decides what a filter keeps."""
    distribution = softmax(row)
    order = np.sort(distribution)[::-1]
    mass = np.cumsum(order) - order
    least = sampling.min_p * distribution.max()
    return bool(
        np.unique(row).size < row.size
        or (sampling.top_p < 1.0 and np.abs(mass - sampling.top_p).min() < 1e-5)
        or (sampling.min_p > 0.0 and np.abs(distribution - least).min() < 1e-4 * least)
    )


def brute(row: Floats, position: int, sampling: Sampling) -> int:
    """The argmax of logits / T + noise over the whole vocabulary, without what is filtered."""
    ids = np.arange(row.size, dtype=np.uint32)
    noise = gumbel(np, sampling.seed, [position], ids[None])[0]
    scores = row / np.float32(sampling.temperature) + noise
    scores[~allowed(row, sampling)] = -np.inf
    return int(np.argmax(scores))


SHAPES = ("flat", "normal", "peaked", "plateau", "masked")


@st.composite
def rows(draw: st.DrawFn, largest: int = 1000) -> Floats:
    """Logits of many shapes and sizes."""
    size = draw(st.integers(2, largest))
    shape = draw(st.sampled_from(SHAPES))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = random.normal(size=size) * {"flat": 0.1, "peaked": 12.0}.get(shape, 3.0)
    if shape == "plateau":
        row = random.normal(size=size) * 0.2
        row[random.integers(size)] += 13.0
    if shape == "masked":
        row[random.random(size) < 0.5] -= 200.0
    return (row + draw(st.sampled_from([0.0, -30.0, 30.0]))).astype(np.float32)


TEMPERATURES = st.one_of(
    st.sampled_from([0.05, 0.2, 0.7, 1.0, 1.5, 5.0, 100.0]), st.floats(0.05, 5.0)
)
SEEDS = st.integers(0, 2**63 - 1)
FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(1, 200),
        "top_p": st.floats(0.01, 0.9999),
        "min_p": st.floats(1e-6, 0.9),
    },
)


@examples(70)
@given(rows(), TEMPERATURES, SEEDS, st.integers(0, 2**31))
def test_choice_is_the_best_of_all(row: Floats, temperature: float, seed: int, at: int) -> None:
    """The chosen token is the argmax of logits / T + noise over the whole vocabulary."""
    sampling = Sampling(temperature=temperature, seed=seed)
    positions = range(at, at + 6)
    expected = [brute(row, position, sampling) for position in positions]
    assert expected == sample(np.tile(row, (6, 1)), positions, sampling)


@examples(70)
@given(rows(), TEMPERATURES, SEEDS, st.integers(0, 2**31), FILTERS)
def test_choice_is_the_best_that_the_filters_keep(
    row: Floats, temperature: float, seed: int, at: int, filters: dict[str, float]
) -> None:
    """With filters, the chosen token is the argmax over the tokens that they keep."""
    sampling = Sampling(temperature=temperature, seed=seed, **filters)
    assume(not borderline(row, sampling))
    positions = range(at, at + 6)
    expected = [brute(row, position, sampling) for position in positions]
    assert expected == sample(np.tile(row, (6, 1)), positions, sampling)


@examples(70)
@given(rows(), FILTERS)
def test_filters_are_those_of_mlx_lm(row: Floats, filters: dict[str, float]) -> None:
    """The filters see the distribution at temperature 1 and keep what mlx-lm's keep, best first."""
    sampling = Sampling(temperature=3.0, **filters)
    assume(not borderline(row, sampling))
    ids = filter_tokens(row, sampling)
    assert np.flatnonzero(allowed(row, sampling)).tolist() == sorted(ids.tolist())
    assert row[ids].tolist() == sorted(row[ids].tolist(), reverse=True)


def test_far_tokens_win_when_their_noise_does() -> None:
    """A token hundreds of thousands of times less likely than the best one still has its share."""
    temperature, size, rounds = 0.5, 20_000, 150
    row = np.zeros(size, dtype=np.float32)
    row[17] = 12.5 * temperature
    sampling = Sampling(temperature=temperature, seed=5)
    expected = [brute(row, position, sampling) for position in range(rounds)]
    assert expected == sample(np.tile(row, (rounds, 1)), range(rounds), sampling)
    assert 0 < sum(token != 17 for token in expected) < rounds // 2


def one_in_ten_thousand(freedom: int) -> float:
    """What chi-square exceeds with probability 1e-4 (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.719 * sqrt(part)) ** 3


PLAIN: dict[str, float] = {}
COMBINED = {"top_k": 6, "top_p": 0.9, "min_p": 0.03}


@pytest.mark.parametrize(
    "filters", [PLAIN, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, COMBINED], ids=str
)
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_choices_follow_the_distribution(temperature: float, filters: dict[str, float]) -> None:
    """Over many positions, tokens are as frequent as the filtered softmax says (chi-square)."""
    row = np.array([1.5, 0.1, -0.4, 2.0, -2.5, 0.7, -1.0, 1.1, -6.0], dtype=np.float32)
    sampling = Sampling(temperature=temperature, seed=11, **filters)
    keep = allowed(row, sampling)
    distribution = np.zeros(row.size)
    distribution[keep] = softmax(row[keep] / temperature)
    draws = 2000
    chosen = sample(np.tile(row, (draws, 1)), range(500, 500 + draws), sampling)
    counts = np.bincount(chosen, minlength=row.size)
    assert not counts[~keep].any()
    expected = draws * distribution[keep]
    chi_square = float(((counts[keep] - expected) ** 2 / expected).sum())
    assert chi_square < one_in_ten_thousand(int(keep.sum()) - 1)


@pytest.mark.parametrize("filters", [PLAIN, COMBINED], ids=str)
def test_temperature_zero_is_greedy(filters: dict[str, float]) -> None:
    """At temperature 0 the best token is chosen whatever the seed and the filters."""
    logits = np.random.default_rng(0).normal(size=(5, 300)).astype(np.float32)
    sampling = Sampling(temperature=0.0, seed=9, **filters)
    assert np.argmax(logits, axis=-1).tolist() == sample(logits, range(5), sampling)


@pytest.mark.parametrize("offset", [-40.0, 0.0, 40.0])
@pytest.mark.parametrize("filters", [PLAIN, {"top_k": 5}], ids=str)
@pytest.mark.parametrize("temperature", [1e-6, 1e-10, 1e-30, 1e-300])
def test_tiny_temperatures_are_greedy(
    temperature: float, filters: dict[str, float], offset: float
) -> None:
    """The smallest temperatures that a request may name choose the best token."""
    logits = np.random.default_rng(1).normal(size=(4, 200)).astype(np.float32) + np.float32(offset)
    sampling = Sampling(temperature=temperature, seed=3, **filters)
    assert np.argmax(logits, axis=-1).tolist() == sample(logits, range(4), sampling)


def test_seeds_and_positions_matter() -> None:
    """Another seed or another position is another draw, and the same ones the same draw."""
    flat = np.zeros((64, 1000), dtype=np.float32)
    first, other = Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2)
    assert sample(flat, range(64), first) == sample(flat, range(64), first)
    assert sample(flat, range(64), first) != sample(flat, range(64), other)
    assert sample(flat, range(64), first)[1:] == sample(flat, range(1, 65), first)[:-1]
    assert len(set(sample(flat, range(64), first))) > 50


@pytest.mark.parametrize("filters", [PLAIN, {"top_k": 4}, COMBINED], ids=str)
def test_masked_tokens_are_never_chosen(filters: dict[str, float]) -> None:
    """A logit of minus infinity has probability zero."""
    row = np.array([0.0, -np.inf, 1.0, -np.inf, 0.5], dtype=np.float32)
    sampling = Sampling(temperature=2.0, **filters)
    assert not {1, 3} & set(sample(np.tile(row, (300, 1)), range(300), sampling))


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 1}, [2]),
        ({"top_p": 1e-9}, [2]),
        ({"min_p": 0.999}, [2]),
        ({"top_k": 3}, [2, 0, 3]),
        ({"top_k": 50}, [2, 0, 3, 4, 1]),
    ],
)
def test_filters_keep_at_least_the_best(filters: dict[str, float], expected: list[int]) -> None:
    """However strict, a filter keeps the best token; ties at its border go to the smaller id."""
    row = np.array([1.0, 0.0, 2.0, 1.0, 1.0], dtype=np.float32)
    assert expected == filter_tokens(row, Sampling(temperature=1.0, **filters)).tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), False),
        (Sampling(top_k=1), True),
        (Sampling(top_p=0.9), True),
        (Sampling(min_p=0.1), True),
    ],
)
def test_filters_are_recognised(sampling: Sampling, expected: bool) -> None:  # noqa: FBT001
    """A filter is in force once its parameter leaves the default."""
    assert expected is has_filter(sampling)


def rank_candidates(
    ids: npt.NDArray[Any], logits: Floats, positions: Sequence[int], sampling: Sampling
) -> npt.NDArray[Any]:
    """Sort a drafter's candidates by their scores, best first."""
    scores = score_candidates(ids, logits, positions, sampling)
    order = np.argsort(-scores, axis=-1, kind="stable")
    return np.take_along_axis(ids, order, axis=-1)


@examples(60)
@given(rows(largest=300), TEMPERATURES, SEEDS, st.integers(0, 2**31), FILTERS)
def test_same_logits_rank_the_targets_choice_first(
    row: Floats, temperature: float, seed: int, at: int, filters: dict[str, float]
) -> None:
    """A drafter with the target's own logits proposes the target's own token, always."""
    sampling = Sampling(temperature=temperature, seed=seed, **filters)
    assume(np.unique(row).size == row.size)
    ids = np.argsort(-row, kind="stable")
    positions = range(at, at + 3)
    orders = rank_candidates(np.tile(ids, (3, 1)), np.tile(row[ids], (3, 1)), positions, sampling)
    assert sample(np.tile(row, (3, 1)), positions, sampling) == orders[:, 0].tolist()
    assert all(sorted(order) == sorted(ids) for order in orders.tolist())
    count = filter_tokens(row, sampling).size
    assert all(set(order[:count]) == set(ids[:count].tolist()) for order in orders.tolist())


def test_ranks_at_temperature_zero_are_the_logits() -> None:
    """A greedy drafter's candidates stay in the order of their logits."""
    ids = np.array([[7, 3, 9]])
    logits = np.array([[3.0, 2.0, 1.0]], dtype=np.float32)
    assert rank_candidates(ids, logits, [4], Sampling()).tolist() == [[7, 3, 9]]


def test_ranks_are_the_order_of_noisy_logits() -> None:
    """The second candidate is the target's second choice, and so on."""
    random = np.random.default_rng(4)
    logits = -np.sort(-random.normal(size=(1, 12)).astype(np.float32))
    ids = random.permutation(1000)[None, :12]
    sampling = Sampling(temperature=1.0, seed=8)
    scores = logits[0] + gumbel(np, 8, [6], ids.astype(np.uint32))[0]
    assert (
        ids[0][np.argsort(-scores)].tolist()
        == rank_candidates(ids, logits, [6], sampling)[0].tolist()
    )


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_distances_are_those_of_the_scores(temperature: float) -> None:
    """How far two candidates are apart is the difference of their scores, told in logits."""
    row = np.random.default_rng(2).normal(size=50).astype(np.float32)
    sampling = Sampling(temperature=temperature, seed=6)
    noise = gumbel(np, 6, [9], np.array([[7, 30]], dtype=np.uint32))[0]
    expected = abs(row[7] - row[30] + temperature * (noise[0] - noise[1]))
    assert score_margin(row, 9, sampling, (7, 30)) == pytest.approx(expected, abs=1e-5)
    assert score_margin(row, 9, sampling, (30, 7)) == score_margin(row, 9, sampling, (7, 30))


def test_a_filtered_candidate_is_infinitely_far() -> None:
    """If the filters keep only one of two candidates, no rounding could exchange them."""
    row = np.array([3.0, 2.0, 1.0], dtype=np.float32)
    sampling = Sampling(temperature=1.0, top_k=2)
    assert score_margin(row, 0, sampling, (0, 2)) == float("inf")
    assert score_margin(row, 0, sampling, (0, 1)) < 30.0
