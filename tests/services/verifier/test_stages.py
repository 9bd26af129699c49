"""A verifier's preparation: requests between its steps have the answers of plain passes."""

from typing import Any

import numpy as np
import pytest

from protocol.messages import (
    CloseSequence,
    FeatureRequest,
    Features,
    OpenSequence,
    ReadTarget,
    Sampling,
    VerificationOutcome,
    Verify,
)
from services.engine import forward_trial, traced_forward
from services.engine.target_model import prepare_plain
from services.kernels.register import KERNELS
from services.mlx import selftest
from services.mlx.loader import load
from services.runtime.loop import Identity
from services.runtime.preparation import Preparer
from services.verifier import pass_times, stages
from services.verifier.verifier import Verifier
from tests.support.reference import tiny_folder

PROMPT = [0, 2, 97, 41, 250, 33, 8]
REQUEST = FeatureRequest(layers=[0, 2], dtype="float32")


def ask(verifier: Verifier, number: int) -> tuple[list[int], list[bytes]]:
    """Three tokens after the prompt, two of them by a chain; and the features."""
    answers: list[Any] = []
    opening = OpenSequence(sequence=number, tokens=PROMPT, sampling=Sampling())
    first = Verify(sequence=number, round=1, position=len(PROMPT), nodes=[23])
    for message in (opening, first):
        answers += verifier.handle(message)
    [token] = [one.bonus for one in answers if isinstance(one, VerificationOutcome)]
    chain = Verify(sequence=number, round=2, position=len(PROMPT) + 1, nodes=[token, 7, 9])
    answers += [*verifier.handle(chain), *verifier.handle(CloseSequence(sequence=number))]
    outcomes = [one for one in answers if isinstance(one, VerificationOutcome)]
    features = [one.data for one in answers if isinstance(one, Features)]
    return [token for one in outcomes for token in (one.accepted, one.bonus)], features


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is right is traced, of few shapes."""
    for module in (stages, "services.engine.target_model"):
        where = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{where}.kernels", lambda: KERNELS["metal"])
    monkeypatch.setattr(selftest, "_WORTHWHILE", float("inf"))
    monkeypatch.setattr(selftest, "TURNS", 1)
    monkeypatch.setattr(forward_trial, "TRACED_SLOTS", (256,))
    monkeypatch.setattr(forward_trial, "MOST_ROWS", 3)
    monkeypatch.setattr(forward_trial, "TREE_ROWS", (4,))
    monkeypatch.setattr(traced_forward, "TREE_ROWS", (4,))
    monkeypatch.setattr(pass_times, "_SWEEPS", 1)
    monkeypatch.setattr(stages, "warm_verifier", lambda _: iter(()))


@pytest.mark.kernel
@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("reads", [False, True], ids=["", "read"])
def test_requests_between_steps_are_answered_as_by_plain_passes(*, reads: bool) -> None:
    """Whatever has been traced by then, and though a drafter may read the target meanwhile."""
    model = load(tiny_folder("llama"))
    verifier = Verifier(model, 512, target=prepare_plain(model.module))
    if reads:
        assert not list(verifier.handle(ReadTarget(features=REQUEST)))
    identity = Identity(
        role="verifier", backend="", model="", tokenizer_fingerprint="", vocabulary_size=0,
        context_length=0, compute_unit="", max_draft_tokens=0,
    )  # fmt: skip
    every = stages.VerifierStages(verifier, identity, "off")
    preparer = Preparer([*every.list(model.folder, is_whole=True, prelaunches=True)])
    number, (expected, states) = 1, ask(verifier, 1)
    while not preparer.is_complete:
        preparer.step()
        number += 1
        tokens, features = ask(verifier, number)
        assert tokens == expected
        assert [len(one) for one in features] == [len(one) for one in states]
        for one, other in zip(features, states, strict=True):
            rows = (np.frombuffer(data, np.float32) for data in (one, other))
            np.testing.assert_allclose(*rows, atol=1e-4)
    assert bool(states) is reads
    assert verifier.target.traced is not None
    assert verifier.target.shares_passes
    assert identity.takes_trees
    assert identity.pass_times.chains
    assert not verifier._sequences
