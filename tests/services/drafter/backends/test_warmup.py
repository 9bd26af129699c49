"""Warming up: every shape is computed once, and nothing of it is left."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from protocol.decoding.token_tree import CHAIN_ROWS, TREE_ROWS, read_tree
from protocol.errors import NotNumbers
from protocol.messages import OpenSequence, Sampling, Tokens, VerificationOutcome, Verify
from services.drafter.backends.base import RoundOptions, TreeLayer
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.warmup import warm_drafter
from services.kernels.register import KERNELS
from services.mlx.loader import load
from services.runtime.preparation import run_all
from services.verifier.pass_times import warm_verifier
from services.verifier.verifier import Verifier
from tests.services.verifier.test_not_a_number import poison
from tests.support.reference import tiny_folder
from tests.support.tiny_models import write_tiny_model

PROMPT: Tokens = [0, 2, 20, 21, 22]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_a_warm_verifier_has_seen_all_lengths_and_is_as_before(family: str) -> None:
    """Chains of 1 to 9 tokens (1 where the state cannot be rewound); then the same outcomes."""
    seen: list[int] = []

    class Counting:
        def __init__(self, module: Any) -> None:
            self._module = module

        def __call__(self, tokens: Any, **rest: Any) -> Any:
            seen.append(tokens.shape[1])
            return self._module(tokens, **rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._module, name)

    def answer(verifier: Verifier) -> tuple[int, int]:
        for message in (
            OpenSequence(sequence=1, tokens=PROMPT, sampling=Sampling()),
            Verify(sequence=1, round=1, position=len(PROMPT), nodes=[23]),
        ):
            said = [word for word in verifier.handle(message) if word is not None]
        assert isinstance(said[-1], VerificationOutcome)
        return said[-1].accepted, said[-1].bonus

    model = load(tiny_folder(family))
    verifier = Verifier(model._replace(module=Counting(model.module)), 512)
    seen.clear()
    run_all(warm_verifier(verifier))
    longest = 9 if verifier.max_draft_tokens else 1
    assert set(range(1, longest + 1)) <= set(seen)
    if verifier.takes_trees:
        assert all(seen.count(rows) > (rows in TREE_ROWS) for rows in CHAIN_ROWS)
    assert answer(verifier) == answer(Verifier(model, 512))
    assert list(verifier._sequences) == [1]


def test_a_warm_drafter_prepares_what_a_cold_one_does() -> None:
    """The same branches, token by token."""

    def layers(backend: MlxBackend) -> Iterator[TreeLayer]:
        for _ in backend.open(1, PROMPT, Sampling()):
            pass
        yield from backend.prepare(1, read_tree([23, 24]), [3, 3], 2, RoundOptions(1))

    warm, cold = (MlxBackend(tiny_folder("llama"), 512) for _ in range(2))
    run_all(warm_drafter(warm))
    assert [layer.tokens for layer in layers(warm)] == [layer.tokens for layer in layers(cold)]


def test_a_broken_model_is_left_to_its_requests(tmp_path: Path) -> None:
    """As on a GPU: what cannot be warmed up starts all the same, and tells whoever asks it."""
    folder = poison(write_tiny_model(tmp_path / "m", "llama"))
    with patch("services.drafter.backends.mlx.kernels", lambda: KERNELS["cuda"]):
        backend = MlxBackend(folder, 512)
    run_all(warm_drafter(backend))
    for _ in backend.open(1, PROMPT, Sampling()):
        pass
    with pytest.raises(NotNumbers, match="drafter"):
        list(backend.prepare(1, read_tree([23]), [2], 2))
    with patch("services.engine.target_model.kernels", lambda: KERNELS["cuda"]):
        verifier = Verifier(load(folder), 512)
    run_all(warm_verifier(verifier))
    assert not verifier._sequences
    list(verifier.handle(OpenSequence(sequence=1, tokens=PROMPT, sampling=Sampling())))
    with pytest.raises(NotNumbers, match="target"):
        list(verifier.handle(Verify(sequence=1, round=1, position=len(PROMPT), nodes=[23])))
