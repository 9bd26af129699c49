"""The target's choice on CUDA: the kernel's source run on the host."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from protocol.decoding import sampler
from protocol.messages import Sampling
from services.kernels.cuda.sampling import choose
from services.kernels.cuda.sampling.rules import write_rules
from services.kernels.register import KERNELS
from services.sampling import device
from tests.services.kernels.cuda.host import compile_kernel, halve_words, run_kernel

UNDECIDED, BROKEN = -1, -2
MOST = 64
"""Candidates that filters look at here, as many as a block has threads."""

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=3),
    Sampling(temperature=5.0, seed=5),
    Sampling(temperature=0.01, seed=6),
    Sampling(temperature=0.8, top_k=20, seed=7),
    Sampling(temperature=0.8, top_k=1, seed=8),
    Sampling(temperature=0.8, top_p=0.9, seed=9),
    Sampling(temperature=1.0, top_p=0.00001, seed=14),
    Sampling(temperature=1.0, min_p=0.05, seed=11),
    Sampling(temperature=3.0, min_p=0.3, seed=15),
    Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=12),
]

each_sampling = pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernel("sampling/choose_host.cpp", tmp_path_factory.mktemp("kernel") / "choose")


def choose_there(
    kernel: Path, row: npt.NDArray[np.float32], position: int, sampling: Sampling
) -> int:
    words = write_rules([position], sampling)
    return int(run_kernel(kernel, len(row), halve_words(words), row)[0])


def draw_row(seed: int, size: int, *, scale: float = 4.0, step: float = 0.0) -> Any:
    row = np.random.default_rng(seed).standard_t(3, size) * scale
    return (np.round(row / step) * step if step else row).astype(np.float32)


@each_sampling
@pytest.mark.parametrize("size", [7, 64, 700])
def test_the_same_token_as_on_the_host(kernel: Path, sampling: Sampling, size: int) -> None:
    undecided = 0
    for seed in range(6):
        row = draw_row(seed, size)
        found = choose_there(kernel, row, seed, sampling)
        undecided += found == UNDECIDED
        assert found in {UNDECIDED, *sampler.sample(row[None], [seed], sampling)}
    assert undecided <= 1


@each_sampling
def test_where_many_are_equal(kernel: Path, sampling: Sampling) -> None:
    """Of equal logits the first token's is chosen, and filters keep the first ones."""
    undecided = 0
    for seed in range(6):
        row = draw_row(seed, 300, step=2.0)
        found = choose_there(kernel, row, seed, sampling)
        undecided += found == UNDECIDED
        assert found in {UNDECIDED, *sampler.sample(row[None], [seed], sampling)}
    assert undecided <= 1


@each_sampling
@pytest.mark.parametrize("allowed", [1, 3])
def test_what_a_grammar_forbids_is_not_chosen(
    kernel: Path, sampling: Sampling, allowed: int
) -> None:
    row = draw_row(5, 200)
    row[np.random.default_rng(allowed).permutation(200)[allowed:]] = -np.inf
    expected = sampler.sample(row[None], [9], sampling)
    assert [choose_there(kernel, row, 9, sampling)] == expected


@pytest.mark.parametrize("filters", [{"top_p": 0.6}, {"min_p": 2 / 3}])
def test_a_winner_at_a_border_is_left_to_the_host(kernel: Path, filters: dict[str, float]) -> None:
    """Rounding may keep it or not."""
    row = np.log(np.array([0.6, 0.4], np.float32))
    sampling = Sampling(temperature=1.0, seed=3, **filters)
    found = {choose_there(kernel, row, position, sampling) for position in range(20)}
    assert found == {0, UNDECIDED}


def test_two_scores_that_rounding_may_swap_are_left_to_the_host(kernel: Path) -> None:
    """Their noise is the same: it is that of one token, which stands at both places by turns."""
    sampling = Sampling(temperature=1.0, seed=3)
    row = np.zeros(2, np.float32)
    words = write_rules([0], sampling)
    noise: Any = device._noise_of(mx.array(words), mx.array([[0, 1]], dtype=mx.uint32))
    row[1] = noise[0, 0].item() - noise[0, 1].item()
    assert choose_there(kernel, row, 0, sampling) == UNDECIDED
    row[1] += 0.01
    assert choose_there(kernel, row, 0, sampling) == 1


def test_more_than_it_looks_at_are_left_to_the_host(kernel: Path) -> None:
    row = np.zeros(MOST + 1, np.float32)
    assert choose_there(kernel, row, 0, Sampling(temperature=1.0, top_p=0.9)) == UNDECIDED
    assert choose_there(kernel, row[:-1], 0, Sampling(temperature=1.0, top_p=0.9)) >= 0


@each_sampling
def test_a_logit_that_is_no_number_is_noticed(kernel: Path, sampling: Sampling) -> None:
    row = draw_row(6, 150)
    row[120] = np.nan
    assert choose_there(kernel, row, 0, sampling) == BROKEN


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=range(1, len(SAMPLINGS)))
def test_logits_beyond_all_bounds_are_left_to_the_host(kernel: Path, sampling: Sampling) -> None:
    row = draw_row(6, 150)
    row[[20, 120]] = np.inf
    assert choose_there(kernel, row, 0, sampling) == UNDECIDED


@pytest.mark.parametrize("change", [0, 1])
def test_it_is_used_where_it_is_right(monkeypatch: pytest.MonkeyPatch, change: int) -> None:
    launched = []

    def launch(rows: mx.array, rules: mx.array) -> mx.array:
        launched.append(rows.shape)
        samplings = {bytes(write_rules([p], s)): (p, s) for p in range(8) for s in choose._TRIAL}
        logits: Any = np.array(rows.astype(mx.float32))
        asked = [samplings[bytes(words)] for words in np.array(rules)]
        found = [
            sampler.sample(row[None], [position], sampling)[0] + change
            for row, (position, sampling) in zip(logits, asked, strict=True)
        ]
        return mx.array(found)

    monkeypatch.setattr(choose, "launch", launch)
    monkeypatch.setattr(device, "kernels", lambda: KERNELS["cuda"])
    choose._works.cache_clear()
    logits = mx.array(np.stack([draw_row(seed, 90) for seed in range(3)]))
    found = device.choose(logits, [4, 5, 6], choose._TRIAL[1])
    choose._works.cache_clear()
    assert ((3, 90) in launched) is (change == 0)
    assert found == sampler.sample(np.array(logits), [4, 5, 6], choose._TRIAL[1])


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@each_sampling
def test_on_the_card_it_chooses_what_the_host_does(dtype: mx.Dtype, sampling: Sampling) -> None:
    rows = mx.array(np.stack([draw_row(seed, 50000) for seed in range(20)])).astype(dtype)
    rows = rows[:, :49152]
    host: Any = np.array(rows.astype(mx.float32))
    found: Any = choose.launch(rows, mx.array(write_rules(range(20), sampling))).tolist()
    expected = sampler.sample(host, range(20), sampling)
    assert all(ours in {UNDECIDED, right} for ours, right in zip(found, expected, strict=True))
    assert found.count(UNDECIDED) <= 4
