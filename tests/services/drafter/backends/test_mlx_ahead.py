"""Drafts whose next pass begins before the last token has been read: those of waiting for it."""

from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from protocol.decoding.token_tree import read_tree
from protocol.messages import LogitsOptions, Sampling, Tokens
from services.drafter.backends import mlx_ahead
from services.drafter.backends.base import DraftedToken, RoundOptions, TreeLayer
from services.drafter.backends.mlx import MlxBackend
from services.kernels.register import KERNELS
from tests.properties import examples
from tests.services.drafter.backends.test_mlx import (
    PROMPT,
    SCRIPT,
    Line,
    Reference,
    Round,
    Setup,
    rounds,
    trimmed,
)
from tests.support.reference import SAMPLINGS, drafts, said, tiny_folder

NUMBERS = count(20_000)


def as_on_a_gpu(folder: Path) -> MlxBackend:
    """The code path of GPUs, computed here on a CPU."""
    with (
        patch("services.drafter.backends.mlx.kernels", lambda: KERNELS["cuda"]),
        patch("services.drafter.backends.draft_weights.kernels", lambda: KERNELS["cuda"]),
    ):
        return MlxBackend(folder, 5)


def as_on_a_cpu(folder: Path) -> MlxBackend:
    """The code path of CPUs, wherever it is computed here."""
    with patch("services.drafter.backends.mlx.kernels", lambda: KERNELS["cpu"]):
        return MlxBackend(folder, 5)


@cache
def setup_of(family: str) -> Setup:
    return Setup(as_on_a_gpu(tiny_folder(family)), Reference(tiny_folder(family)))


pytestmark = pytest.mark.usefixtures("all_candidates")


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("family", ["llama", "sliding", "gemma3", "qwen3"])
def test_drafts_equal_fresh_drafting(family: str, sampling: str) -> None:
    """Every branch and draft of many rounds in a row is that of a fresh start from its prefix."""
    line = Line(setup_of(family), SAMPLINGS[sampling])
    with patch.object(mlx_ahead, "guess", wraps=mlx_ahead.guess) as chosen:
        for played in SCRIPT:
            line.play(played)
    assert line.outcomes_hit >= 6
    assert chosen.called
    setup_of(family).backend.close(line.number)


@examples(30, phases=(Phase.generate,))
@given(
    family=st.sampled_from(["llama", "sliding"]),
    sampling=st.sampled_from(list(SAMPLINGS.values())),
    script=st.lists(rounds, min_size=1, max_size=8),
)
def test_random_rounds_equal_fresh_drafting(
    family: str, sampling: Sampling, script: list[Round]
) -> None:
    """So are those of random fan-outs, depths, outcomes, interruptions and rewinds."""
    line = Line(setup_of(family), sampling)
    for played in script:
        line.play(played)
    setup_of(family).backend.close(line.number)


@pytest.mark.parametrize("ids", [[5], [200, 5], [7, 160, 31]], ids=str)
def test_a_head_of_few_tokens(tmp_path: Path, ids: Tokens) -> None:
    """It drafts its own tokens, and has no more runners-up than tokens."""
    trimmed(tmp_path, "llama", ids)
    backend = as_on_a_gpu(tmp_path)
    for sampling in SAMPLINGS.values():
        list(backend.open(1, list(PROMPT), sampling))
        layers = said(backend.prepare(1, read_tree([120]), [2], 3, RoundOptions(siblings=4)))
        branches = len(layers[0].outcomes)
        for layer in layers:
            assert set(layer.tokens) <= set(ids)
            assert branches <= len(layer.tokens) <= branches * len(ids)
        assert {drafted.token for drafted in drafts(backend.draft(1, 99, 3))} <= set(ids)
        backend.close(1)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_waiting_and_not_waiting_draft_the_same(sampling: Sampling) -> None:
    """Tokens, and confidences within rounding."""

    def draft(backend: MlxBackend) -> tuple[list[TreeLayer], list[DraftedToken]]:
        list(backend.open(1, list(PROMPT), sampling))
        layers = said(backend.prepare(1, read_tree([120, 7, 160]), [3, 3, 4], 4))
        backend.commit(1, len(PROMPT), [120, 7, 160])
        return layers, drafts(backend.draft(1, layers[0].outcomes[-1].bonus, 5))

    folder = tiny_folder("llama")
    waiting = as_on_a_gpu(folder)
    waiting.ahead = None
    layers, drafted = draft(waiting)
    layers_ahead, drafted_ahead = draft(as_on_a_gpu(folder))
    for one, other in zip(layers, layers_ahead, strict=True):
        assert (one.outcomes, one.tokens) == (other.outcomes, other.tokens)
        assert np.allclose(one.confidences, other.confidences, atol=1e-5)
    assert [one.token for one in drafted] == [one.token for one in drafted_ahead]


# ---------------------------------------------------------------- when passes begin


def test_a_token_s_pass_begins_before_the_last_one_is_told() -> None:
    """Two passes have begun when the first token is there; none beyond the last."""
    backend, begun = as_on_a_gpu(tiny_folder("llama")), []
    list(backend.open(1, list(PROMPT), Sampling()))
    with patch.object(mlx_ahead, "guess", wraps=mlx_ahead.guess) as chosen:
        for _ in backend.draft(1, 99, 3):
            begun.append(chosen.call_count)
    assert begun == [2, 3, 3]


WAITED = {
    "under the rejection rule": Sampling(temperature=0.8, acceptance="rejection"),
    "with penalties": Sampling(logits_options=LogitsOptions(presence_penalty=1.0)),
}


@pytest.mark.parametrize("case", WAITED)
def test_what_is_waited_for(case: str) -> None:
    """Where the tokens decide what comes next, nothing begins ahead."""
    backend = as_on_a_gpu(tiny_folder("llama"))
    list(backend.open(1, list(PROMPT), WAITED[case]))
    with patch.object(mlx_ahead, "guess", wraps=mlx_ahead.guess) as chosen:
        assert len(said(backend.prepare(1, read_tree([120, 7]), [2, 2], 3))) == 3
        assert len(drafts(backend.draft(1, 99, 3))) == 3
    assert not chosen.called


def test_a_cpu_waits() -> None:
    """There the model's own work is what takes the time."""
    assert as_on_a_cpu(tiny_folder("llama")).ahead is None


def test_a_pass_that_does_not_fit_leaves_the_trunk_as_it_was() -> None:
    """The refusal of the second pass of a draft ends it; the next one is what it would be."""
    backend = as_on_a_gpu(tiny_folder("llama"))
    list(backend.open(1, list(PROMPT), Sampling()))
    expected = drafts(backend.draft(1, 120, 4))
    model, calls = backend._runner.model, count()

    def fail(*arguments: Any, **rest: Any) -> Any:
        if next(calls) == 1:
            raise ValueError("does not fit")
        return model(*arguments, **rest)

    assert backend.ahead is not None
    with patch.object(backend._runner, "model", fail), pytest.raises(ValueError, match="not fit"):
        drafts(backend.draft(1, 120, 4))
    known = backend._sequences[1]
    assert known.store.length == len(known.tokens)
    assert drafts(backend.draft(1, 120, 4)) == expected
