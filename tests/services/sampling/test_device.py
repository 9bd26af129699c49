"""Choosing tokens beside the logits gives the very tokens of the numpy sampler."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding import sampler
from protocol.decoding.token_tree import read_tree
from protocol.messages import OpenSequence, Sampling, Tokens, VerificationOutcome, Verify
from services.drafter.backends.mlx import MlxBackend
from services.kernels.cpu.choice import choose_on_cpu
from services.kernels.cuda.sampling.choose import choose_on_cuda
from services.kernels.register import KERNELS
from services.mlx.loader import load
from services.sampling import device
from services.sampling.candidates import best_of
from services.verifier.acceptance import AcceptanceRule
from services.verifier.verifier import Verifier
from tests.support.reference import drafts, for_the_cpu, plain, said, tiny_folder

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=3),
    Sampling(temperature=1.0, seed=4),
    Sampling(temperature=5.0, seed=5),
    Sampling(temperature=0.01, seed=6),
    Sampling(temperature=0.8, top_k=20, seed=7),
    Sampling(temperature=0.8, top_k=1, seed=8),
    Sampling(temperature=0.8, top_p=0.9, seed=9),
    Sampling(temperature=1.5, top_p=0.999, seed=10),
    Sampling(temperature=1.0, min_p=0.05, seed=11),
    Sampling(temperature=3.0, min_p=0.3, seed=15),
    Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=12),
    Sampling(temperature=1.0, top_k=2000, seed=13),
    Sampling(temperature=1.0, top_p=0.00001, seed=14),
]


def rows(seed: int, count: int, size: int, *, scale: float = 3.0, step: float = 0.0) -> np.ndarray:
    """Logits of a peaked law; with a `step` they are rounded to it, so that many are equal."""
    drawn = np.random.default_rng(seed).standard_t(3, (count, size)) * scale
    if step:
        drawn = np.round(drawn / step) * step
    return drawn.astype(np.float32)


def choices(logits: np.ndarray, positions: Sequence[int], sampling: Sampling) -> list[list[int]]:
    """By what chooses here, on a CPU our kernel, and by MLX, as on a GPU."""
    found = [device.choose(mx.array(logits), positions, sampling)]
    with patch.object(device, "kernels", lambda: KERNELS["metal"]):
        return [*found, device.choose(mx.array(logits), positions, sampling)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_the_same_tokens_as_on_the_host(sampling: Sampling, step: float) -> None:
    """Over 240 rows of a large vocabulary, with and without many equal logits."""
    logits = rows(1, 240, 8192, step=step)
    positions = range(1000, 1240)
    expected = sampler.sample(logits, positions, sampling)
    for found in choices(logits, positions, sampling):
        assert expected == found


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("allowed", [1, 3, 200])
def test_what_a_grammar_forbids_is_not_chosen(sampling: Sampling, allowed: int) -> None:
    """However many tokens are left."""
    logits, positions = rows(3, 20, 1000), range(20)
    for row in logits:
        row[np.random.default_rng(allowed).permutation(1000)[allowed:]] = -np.inf
    expected = sampler.sample(logits, positions, sampling)
    for found in choices(logits, positions, sampling):
        assert expected == found


@for_the_cpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_kernel_seldom_leaves_a_row_to_the_host(sampling: Sampling) -> None:
    """And never to MLX."""
    logits = rows(2, 400, 8192)
    tokens = choose_on_cpu(mx.array(logits), range(400), sampling)
    assert tokens is not None
    assert np.count_nonzero(np.array(tokens) < 0) <= 8


@for_the_cpu
@pytest.mark.parametrize("filters", [{"top_p": 0.6}, {"min_p": 2 / 3}])
def test_a_winner_at_a_border_is_left_to_the_host(filters: dict[str, float]) -> None:
    """Rounding may keep it or not."""
    logits = np.tile(np.log(np.array([0.6, 0.4], np.float32)), (50, 1))
    tokens = choose_on_cpu(
        mx.array(logits), range(50), Sampling(temperature=1.0, seed=3, **filters)
    )
    assert tokens is not None
    assert set(tokens.tolist()) == {0, -1}


@given(
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0.0, 3.0),
        top_k=st.integers(0, 12),
        top_p=st.floats(0.01, 1.0),
        min_p=st.floats(0.0, 0.9),
        seed=st.integers(0, 2**32 - 1),
    ),
    size=st.sampled_from([2, 7, 288, 1500]),
    step=st.sampled_from([0.0, 0.25, 4.0]),
)
def test_the_same_tokens_under_any_filters(sampling: Sampling, size: int, step: float) -> None:
    """Borders of filters, tiny vocabularies and ties included."""
    logits = rows(sampling.seed, 6, size, step=step)
    positions = range(sampling.seed % 1000, sampling.seed % 1000 + 6)
    expected = sampler.sample(logits, positions, sampling)
    for found in choices(logits, positions, sampling):
        assert expected == found


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits(dtype: mx.Dtype) -> None:
    """They are widened first, as on the host; ties abound."""
    logits = mx.array(rows(2, 60, 4096)).astype(dtype)
    host = np.array(logits.astype(mx.float32))
    for sampling in SAMPLINGS[1:]:
        expected = sampler.sample(host, range(60), sampling)
        assert expected == device.choose(logits, range(60), sampling)


@pytest.mark.parametrize("sampling", [SAMPLINGS[1], SAMPLINGS[5], SAMPLINGS[10]], ids=str)
def test_rows_seldom_go_to_the_host(sampling: Sampling) -> None:
    """What is moved is the exception: less than one row in fifty."""
    logits = mx.array(rows(3, 300, 8192))
    with patch.object(sampler, "sample", wraps=sampler.sample) as choose:
        device.choose(logits, range(300), sampling)
    assert choose.call_count < 6


@pytest.mark.parametrize("width", [1, 3, 64, 500])
def test_the_best_candidates(width: int) -> None:
    """Ids, logits and the law's normaliser, as on the host; ids of a trimmed head too."""
    logits = rows(4, 9, 300)
    for head_ids in (None, np.arange(300)[::-1] * 2):
        expected = best_of(logits, width, head_ids)
        actual = device.best_of(mx.array(logits), width, head_ids)
        assert np.array_equal(expected.ids, actual.ids)
        assert np.array_equal(expected.logits, actual.logits)
        assert np.allclose(expected.totals, actual.totals, rtol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=4)], ids=str)
def test_a_drafter_on_a_gpu_drafts_the_same(sampling: Sampling) -> None:
    """The code path of GPUs, computed here on a CPU, gives the trees of the other one."""

    def trees() -> list[tuple[list[object], list[int]]]:
        backend = MlxBackend(tiny_folder("llama"), 512)
        list(backend.open(1, [5, 9, 33, 71], sampling))
        found = []
        for chain in ([12, 40, 41], [12, 40, 17]):
            for layer in backend.prepare(1, read_tree(chain), [3, 3, 4], 3):
                found.append((list(layer.outcomes), layer.tokens))
        branch = found[-1][0][-1]
        backend.commit(1, 4, [12, 40, 17])
        pending = branch.bonus  # type: ignore[attr-defined]
        found += [([d.confidence > 0], [d.token]) for d in drafts(backend.draft(1, pending, 3))]
        return found

    on_host = trees()
    with patch("services.drafter.backends.mlx.kernels", lambda: KERNELS["cuda"]):
        on_gpu = trees()
    assert on_host == on_gpu


def test_a_verifier_on_a_gpu_commits_the_same() -> None:
    """The code path of GPUs, computed here on a CPU: the tokens of plain decoding."""
    with patch("services.engine.target_model.kernels", lambda: KERNELS["cuda"]):
        verifier = Verifier(load(tiny_folder("llama")), 512)
        for number, sampling in enumerate((Sampling(), *SAMPLINGS[7:9])):
            expected = plain("llama", (11, 200, 5), 12, sampling)
            assert expected == answer(verifier, number, [11, 200, 5], expected, sampling)


def answer(
    verifier: Verifier, number: int, prompt: Tokens, expected: Tokens, sampling: Sampling
) -> Tokens:
    """As many tokens as expected, verified behind drafts of two right tokens and a wrong one."""
    opened = OpenSequence(sequence=number, tokens=prompt[:-1], sampling=sampling)
    list(verifier.handle(opened))
    tokens, upto = list(prompt), len(prompt) + len(expected)
    while len(tokens) < upto:
        right = [*expected, 0, 0][len(tokens) - len(prompt) :][:2]
        draft = [*right, 7]
        chain = [tokens[-1], *draft]
        ask = Verify(sequence=number, round=len(tokens), position=len(tokens) - 1, nodes=chain)
        [outcome] = said(verifier.handle(ask))
        assert isinstance(outcome, VerificationOutcome)
        tokens += [*draft[: outcome.accepted], outcome.bonus]
    return tokens[len(prompt) : upto]


class Newer(Sampling, frozen=True):
    """A request with a way of sampling that only the host knows."""

    typical_p: float = 1.0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_unknown_way_of_sampling_is_left_to_the_host(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every kernel and by MLX; at its default it changes nothing."""
    logits, positions = mx.array(rows(2, 4, 1000)), range(4)
    monkeypatch.setattr("services.kernels.cuda.sampling.choose._works", lambda _: True)
    newer = Newer(temperature=temperature, typical_p=0.9)
    assert choose_on_cpu(logits, positions, newer) is None
    assert choose_on_cuda(logits, positions, newer) is None
    assert set(np.array(device.begin(logits, positions, newer)).tolist()) == {-1}
    usual = device.choose(logits, positions, Sampling(temperature=temperature))
    assert device.choose(logits, positions, Newer(temperature=temperature)) == usual
    opened = OpenSequence(sequence=1, tokens=[1], sampling=newer)
    rule = AcceptanceRule(opened, Path())
    assert not rule.is_on_device
    assert not rule.is_likeliest
