"""Chains of one launch: the drafts of the model's own passes, or not used.

The kernel itself runs in tests/services/kernels/cuda/test_persistent.py; here the model takes its
place, and writes keys and values as it does.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from protocol.errors import NotNumbers
from protocol.messages import Sampling, Tokens
from services.drafter.backends import mlx_chain
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.mlx_chain import Chains
from services.kernels.cpu.library import view
from services.kernels.cuda import kv_rows
from services.kernels.cuda.persistent import MOST_DEPTHS, MOST_ROWS, Unavailable
from services.runtime.preparation import run_all
from services.sampling.device import guess
from tests.properties import examples
from tests.services.drafter.backends.test_mlx import PROMPT, SCRIPT, Line, Round, Setup, rounds
from tests.services.drafter.backends.test_mlx_ahead import as_on_a_gpu
from tests.services.kernels.cuda.host import move_rows
from tests.support.reference import SAMPLINGS, Reference, drafts, said, tiny_folder

pytestmark = pytest.mark.usefixtures("all_candidates", "rows_moved_here")


@pytest.fixture(scope="module")
def rows_moved_here() -> Iterator[None]:
    """Rows are moved in place, too, without the kernel for it."""
    with patch.object(kv_rows, "move", move_rows):
        yield


class ModelChain:
    """Drafts as the kernel does, by the model's own passes."""

    def __init__(self, model: Any, ids: mx.array) -> None:
        self._model, self._ids = model, ids
        self.fed: list[int] = []
        """Tokens fed at once, of each chain."""
        self.most = MOST_DEPTHS
        """Tokens after which the device does not answer."""

    def draft(
        self, buffers: Sequence[Any], first: int, tokens: Tokens, rules: Any, kind: int
    ) -> Iterator[tuple[int, float]]:
        del kind
        assert 0 < len(tokens) <= MOST_ROWS
        assert 0 < len(rules) <= MOST_DEPTHS
        self.fed.append(len(tokens))
        mx.eval(buffers)
        caches = []
        for keys, values in buffers:
            caches.append(KVCache())
            caches[-1].update_and_fetch(keys[:, :, :first], values[:, :, :first])
        following = mx.array(tokens)
        for depth, rule in enumerate(rules):
            if depth == self.most:
                raise Unavailable("gone")
            logits = self._model(following[None], cache=caches)[0, -1:, : self._ids.size]
            temperature, _, top_p, min_p = rule.view(np.float32)[2:].tolist()
            sampling = Sampling(
                temperature=temperature, top_k=int(rule[3]), top_p=top_p, min_p=min_p
            )
            following, found = guess(logits, 1, self._ids, mx.array(rule)[None], sampling)
            at = caches[0].offset
            for pair, cache_ in zip(buffers, caches, strict=True):
                for buffer, own in zip(pair, (cache_.keys, cache_.values), strict=True):
                    view(buffer)[:, :, first:at] = np.array(own[:, :, first:at])
            yield int(following.item()), float(found[1, 0, 0].item())


def equip(backend: MlxBackend) -> ModelChain:
    """Let this backend draft by a chain."""
    assert backend.ahead is not None
    chain: Any = ModelChain(backend._model, backend.ahead.ids)
    backend.ahead.chains = Chains(chain)
    return chain


@cache
def setup_of(family: str) -> tuple[Setup, ModelChain]:
    setup = Setup(as_on_a_gpu(tiny_folder(family)), Reference(tiny_folder(family)))
    return setup, equip(setup.backend)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_drafts_equal_fresh_drafting(family: str, sampling: Sampling) -> None:
    """Every branch and draft of many rounds in a row is that of a fresh start from its prefix."""
    setup, chain = setup_of(family)
    chain.fed.clear()
    line = Line(setup, sampling)
    for played in SCRIPT:
        line.play(played)
    assert line.outcomes_hit >= 6
    assert len(chain.fed) >= 3
    setup.backend.close(line.number)


@examples(30, phases=(Phase.generate,))
@given(
    sampling=st.sampled_from(list(SAMPLINGS.values())),
    script=st.lists(rounds, min_size=1, max_size=8),
)
def test_random_rounds_equal_fresh_drafting(sampling: Sampling, script: list[Round]) -> None:
    """So are those of random fan-outs, depths, outcomes, interruptions and rewinds."""
    setup, _ = setup_of("llama")
    line = Line(setup, sampling)
    for played in script:
        line.play(played)
    setup.backend.close(line.number)


@pytest.mark.parametrize("committed", [0, MOST_ROWS - 1, MOST_ROWS, 40])
def test_any_number_of_missing_tokens(committed: int) -> None:
    """A few are fed with the pending one, many before it."""
    text = [5 + 3 * at for at in range(committed)]
    found = []
    for backend in (as_on_a_gpu(tiny_folder("llama")), as_on_a_gpu(tiny_folder("llama"))):
        chain = equip(backend) if found else None
        list(backend.open(1, list(PROMPT), Sampling()))
        backend.commit(1, len(PROMPT), text)
        found.append([drafted.token for drafted in drafts(backend.draft(1, 99, 5))])
        if chain is not None:
            assert chain.fed == [1 + committed if committed < MOST_ROWS else 1]
    assert found[0] == found[1]


def test_longer_chains_than_the_kernel_drafts() -> None:
    backend = as_on_a_gpu(tiny_folder("llama"))
    chain = equip(backend)
    list(backend.open(1, list(PROMPT), Sampling()))
    assert len(drafts(backend.draft(1, 99, MOST_DEPTHS + 1))) == MOST_DEPTHS + 1
    assert not chain.fed


def test_forks_keep_their_own_tokens() -> None:
    """Nothing is written into buffers that a cached prefix holds."""
    backend = as_on_a_gpu(tiny_folder("llama"))
    chain = equip(backend)
    list(backend.open(1, list(PROMPT), Sampling()))
    fork = backend._sequences[1].store.fork(len(PROMPT))
    before = [np.array(array) for array in fork.arrays]
    said(backend.draft(1, 99, 4))
    assert chain.fed
    for array, held in zip(fork.arrays, before, strict=True):
        assert np.array_equal(np.array(array), held)


def test_a_device_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The draft ends there, and the next one is the model's own."""
    backend = as_on_a_gpu(tiny_folder("llama"))
    list(backend.open(1, list(PROMPT), Sampling()))
    expected = [drafted.token for drafted in drafts(backend.draft(1, 99, 4))]
    backend.close(1)
    chain = equip(backend)
    chain.most = 2
    list(backend.open(1, list(PROMPT), Sampling()))
    assert [drafted.token for drafted in drafts(backend.draft(1, 99, 4))] == expected[:2]
    assert "not used any more: gone" in caplog.text
    assert [drafted.token for drafted in drafts(backend.draft(1, 99, 4))] == expected
    assert len(chain.fed) == 1


def test_broken_logits_are_an_error() -> None:
    backend = as_on_a_gpu(tiny_folder("llama"))
    chain = equip(backend)
    list(backend.open(1, list(PROMPT), Sampling()))
    broken = patch.object(chain, "draft", return_value=iter([(3, float("nan"))]))
    with broken, pytest.raises(NotNumbers):
        said(backend.draft(1, 99, 4))


# ---------------------------------------------------------------- what is not used


def trace(backend: MlxBackend, *, faster: bool = True, shift: int = 0) -> None:
    """Prepare it where the kernel is there, whose tokens are this far from the model's."""
    assert backend.ahead is not None

    def open_(model: Any, ids: mx.array) -> Any:
        return ModelChain(model, ids + shift)

    with (
        patch.object(mlx_chain, "_open", open_),
        patch.object(mlx_chain, "is_faster", lambda *_: faster),
    ):
        run_all(backend.trace())


def test_a_right_and_fast_kernel_is_used() -> None:
    backend = as_on_a_gpu(tiny_folder("llama"))
    trace(backend)
    assert backend.ahead is not None
    assert backend.ahead.chains is not None


def test_a_slow_kernel_is_not_used() -> None:
    backend = as_on_a_gpu(tiny_folder("llama"))
    trace(backend, faster=False)
    assert backend.ahead is not None
    assert backend.ahead.chains is None


def test_a_wrong_kernel_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = as_on_a_gpu(tiny_folder("llama"))
    trace(backend, shift=1)
    assert backend.ahead is not None
    assert backend.ahead.chains is None
    assert "0 of 8 tokens are the usual ones" in caplog.text


def test_a_model_without_kernels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = as_on_a_gpu(tiny_folder("llama"))
    run_all(backend.trace())
    assert backend.ahead is not None
    assert backend.ahead.chains is None
    assert "chains drafted in one launch: not used: its blocks have no kernels" in caplog.text
