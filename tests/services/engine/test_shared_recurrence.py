"""Recurrent layers of several sequences in one pass: each gets the bits that it has alone."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from services.engine.packing import pack_pass
from services.engine.target_model import TargetModel, prepare
from services.kv.shared_recurrence import PackedArrays
from services.kv.state import SequenceState
from services.mlx.loader import load
from tests.support.reference import tiny_folder

SHARING = ("qwen3_5", "olmo_hybrid", "lfm2", "mamba2", "nemotron_h", "falcon_h1")
"""A family of each kind: with one convolution or three, without recurrence, without attention,
without RoPE, and with both kinds of state in every layer."""


class Part(NamedTuple):
    """One sequence of a shared pass."""

    prompt: Sequence[int]
    chain: Sequence[int]
    stand: int
    """Tokens of the chain that stand."""


PARTS = (
    Part([1, 2, 3, 4, 5, 6, 7], [8, 9, 10], 1),
    Part([11, 12], [13, 14, 15], 3),
    Part([], [16, 17], 1),
    Part([18, 19, 20, 21], [22], 1),
    Part([23, 24, 25], [26, 27, 28], 2),
)


@cache
def target_of(family: str) -> TargetModel:
    return prepare(load(tiny_folder(family)).module)


def begin(target: TargetModel) -> list[SequenceState]:
    """The sequences, with their prompts computed."""
    states = []
    for part in PARTS:
        state = target.states.make()
        if part.prompt:
            state.append(len(part.prompt), whole=True)
            target.verify(mx.array([part.prompt]), cache=state.caches)
            state.commit(len(part.prompt))
        states.append(state)
    return states


def finish(target: TargetModel, states: list[SequenceState]) -> list[mx.array]:
    """Commit what stands; the logits of one more token of each sequence, alone."""
    found = []
    for state, part in zip(states, PARTS, strict=True):
        state.commit(len(part.prompt) + part.stand)
        assert state.owed == 0
        state.append(1)
        found.append(target.verify(mx.array([[99]]), cache=state.caches)[0])
    return found


@cache
def alone(family: str) -> list[mx.array]:
    """Logits of the chains and of the token behind each, sequence by sequence."""
    target = target_of(family)
    states, chains = begin(target), []
    nexts: list[Any] = []
    for state, part in zip(states, PARTS, strict=True):
        state.append(len(part.chain))
        chains.append(target.verify(mx.array([part.chain]), cache=state.caches)[0])
        state.commit(len(part.prompt) + part.stand)
        state.append(1)
        nexts.append(target.verify(mx.array([[99]]), cache=state.caches)[0])
    return chains + nexts


@pytest.mark.parametrize("in_batches", [False, True], ids=["one by one", "in batches"])
@pytest.mark.parametrize("family", SHARING)
def test_a_sequence_has_its_own_bits_in_company(family: str, *, in_batches: bool) -> None:
    """Of equal and unequal numbers of rows, new and old; also after a rejection.

    CUDA's products of other numbers of rows add in another order: there they are close.
    """
    target = target_of(family)
    assert target.shares_passes
    states = begin(target)
    for state, part in zip(states, PARTS, strict=True):
        state.append(len(part.chain))
    row = [token for part in PARTS for token in part.chain]
    with pack_pass(states, in_batches=in_batches) as caches:
        logits = target.verify(mx.array([row]), cache=caches)[0]
    ends = [sum(len(part.chain) for part in PARTS[: i + 1]) for i in range(len(PARTS) - 1)]
    found = [*mx.split(logits, ends), *finish(target, states)]
    for own, expected in zip(found, alone(family), strict=True):
        if mx.cuda.is_available():
            np.testing.assert_allclose(np.array(own), np.array(expected), atol=1e-3)
        else:
            assert bool(mx.array_equal(own, expected))


@pytest.mark.parametrize("family", ["jamba", "rwkv7", "kimi_linear"])
def test_who_cannot_be_kept_apart_takes_no_company(family: str) -> None:
    """Recurrences of an unknown kind, or attention that is written out for arrays."""
    assert not target_of(family).shares_passes


def test_a_state_that_mixes_sequences_is_refused() -> None:
    """A model that computes with the states itself, in place of the recurrence that is hooked."""
    caches = PackedArrays([[None], [None]], [None])
    with pytest.raises(TypeError, match="keep its sequences apart"):
        caches[0] = mx.zeros((1, 2))
