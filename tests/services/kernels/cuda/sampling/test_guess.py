"""A drafter's guesses on CUDA: the kernel's source run on the host."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.messages import Sampling
from services.kernels.cuda.sampling import guess
from services.kernels.cuda.sampling.guess import DRAWN, FILTERED, GREEDY
from services.kernels.cuda.sampling.rules import write_rules
from services.kernels.register import KERNELS
from services.sampling import candidates, device
from tests.services.kernels.cuda.host import compile_kernel, halve_words, run_kernel

SAMPLINGS = {
    GREEDY: [Sampling()],
    DRAWN: [Sampling(temperature=0.7, seed=3), Sampling(temperature=4.0, seed=4)],
    FILTERED: [
        Sampling(temperature=0.8, top_k=20, seed=7),
        Sampling(temperature=0.8, top_k=1, seed=8),
        Sampling(temperature=2.0, top_p=0.9, seed=9),
        Sampling(temperature=1.0, min_p=0.1, seed=11),
        Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=12),
    ],
}
CASES = [(kind, sampling) for kind, those in SAMPLINGS.items() for sampling in those]
each_case = pytest.mark.parametrize(("kind", "sampling"), CASES, ids=range(len(CASES)))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernel("sampling/guess_host.cpp", tmp_path_factory.mktemp("kernel") / "guess")


def draw(seed: int, head: int, scale: float = 3.0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    row = (random.standard_t(3, head) * scale).astype(np.float32)
    return row, random.permutation(2 * head)[:head]


@pytest.mark.parametrize("width", [1, 8])
@each_case
@pytest.mark.parametrize("head", [64, 300])
def test_guesses_what_the_host_does(
    kernel: Path, width: int, kind: int, sampling: Sampling, head: int
) -> None:
    for seed, scale in enumerate((3.0, 0.2)):  # what is no candidate has next to no share, or most
        row, ids = draw(seed, head, scale)
        words = write_rules([seed], sampling)
        found = run_kernel(kernel, width, kind, head, halve_words(words), ids, row)
        best = candidates.best_of(row[None], head if kind == DRAWN else guess.CANDIDATES, ids)
        top = candidates.perturb(best, [seed], sampling)
        assert found[0] == found[1]
        sure = np.array(top.confidences(0, width))
        likely = sure > 0.0  # what the filters drop may come in any order
        np.testing.assert_array_equal(found[1 : 1 + width][likely], top.ids[0, :width][likely])
        np.testing.assert_allclose(found[1 + width :], sure, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("head", [100, 300])
@each_case
def test_a_logit_that_is_no_number_is_noticed(
    kernel: Path, kind: int, sampling: Sampling, head: int
) -> None:
    row, ids = draw(0, head)
    row[50] = np.nan
    words = halve_words(write_rules([0], sampling))
    assert np.isnan(run_kernel(kernel, 1, kind, head, words, ids, row)[-1])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("change", [1.0, 1.1])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_it_is_used_where_it_is_right(
    monkeypatch: pytest.MonkeyPatch, kind: int, change: float, dtype: mx.Dtype
) -> None:
    launched = []
    sampling = guess._TRIAL[kind]

    def launch(
        rows: mx.array, ids: mx.array, rules: mx.array, kind: int
    ) -> tuple[mx.array, mx.array]:
        launched.append((rows.shape, kind))
        best, found = device._guess_by_mlx(rows, ids, rules, sampling)
        return best, found * mx.array([1.0, change])[:, None]

    monkeypatch.setattr(guess, "launch", launch)
    guess._works.cache_clear()
    row, ids = (mx.array(one) for one in draw(1, 100))
    rows, rules = row[None].astype(dtype), mx.array(write_rules([6], sampling))
    monkeypatch.setattr(device, "kernels", lambda: KERNELS["cpu"])
    expected = device.guess(rows, ids, rules, sampling)
    cuda = KERNELS["cuda"]._replace(find_best=lambda *_: None)
    monkeypatch.setattr(device, "kernels", lambda: cuda)
    for _ in range(2):
        best, found = device.guess(rows, ids, rules, sampling)
    guess._works.cache_clear()
    used = [((1, 100), kind)] * 2 if change == 1.0 else []
    assert launched == [(guess._TRIAL_SHAPE, kind), *used]
    assert best.item() == expected[0].item()
    np.testing.assert_allclose(np.array(found), np.array(expected[1]), rtol=1e-5)


def test_some_rows_are_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with fewer columns than the filters' candidates."""
    monkeypatch.setattr(guess, "_works", lambda *_: True)
    ids, rules = mx.arange(63), mx.array(write_rules([0], Sampling()))
    args = mx.zeros((1, 63)), ids, rules, GREEDY, device._guess_on_host
    assert guess.guess_tokens(*args) is None


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@each_case
def test_on_the_card_it_guesses_what_mlx_s_operations_do(kind: int, sampling: Sampling) -> None:
    rows = mx.random.normal((9, 16100), key=mx.random.key(kind)).astype(mx.float16)[:, :16000]
    ids = mx.arange(16000)[::-1] + 3
    rules = mx.array(write_rules(range(9), sampling))
    best, found = guess.launch(rows, ids, rules, kind)
    expected = device._guess_by_mlx(rows, ids, rules, sampling)
    np.testing.assert_array_equal(np.array(best), np.array(expected[0]))
    np.testing.assert_allclose(np.array(found[1]), np.array(expected[1][1]), rtol=2e-3, atol=1e-6)
