"""Warming up: every shape is computed once, nothing of it is left, and Hello has the times."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from protocol.decoding.token_tree import CHAIN_ROWS, TREE_ROWS, read_tree
from protocol.errors import NotNumbers
from protocol.messages import (
    OpenSequence,
    PassTimes,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from protocol.settings import DrafterSettings
from services.drafter import main
from services.drafter.backends import warmup
from services.drafter.backends.base import (
    BackendIdentity,
    DraftedToken,
    RoundOptions,
    TreeLayer,
    to_layer,
)
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.warmup import time_drafts, warm_drafter
from services.drafter.relay import relay
from services.drafter.server.main import _identify
from services.kernels.register import KERNELS
from services.mlx.loader import load
from services.runtime.loop import Identity, _hello
from services.runtime.preparation import Preparer, Stage, run_all
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
    verifier.scheduler.runner.traced = None  # replays of a trace cannot be counted
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


class Clocked:
    """A drafter on a clock of its own: a token takes 100 ms at first, then 30, 20, 20, ..."""

    def __init__(self, model: str = "m", longest: int = 64) -> None:
        self.identity = BackendIdentity("mlx", model, "t", 9 if model else 0, 0, "cpu", 64)
        self.longest, self.drafts, self.now_s, self.is_open = longest, 0, 0.0, False

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Iterator[None]:
        self.is_open = True
        yield

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions
    ) -> Iterator[Any]:
        assert self.is_open
        self.drafts += 1
        for _ in range(min(count, self.longest)):
            self.now_s += {1: 0.1, 2: 0.03}.get(self.drafts, 0.02)
            yield to_layer(DraftedToken(1, 1.0))
            yield None  # others have their turn

    def close(self, sequence: int) -> None:
        self.is_open = False


def timed(backend: Clocked, budget_s: float, monkeypatch: pytest.MonkeyPatch) -> PassTimes:
    monkeypatch.setattr(warmup, "_BUDGET_S", budget_s)
    monkeypatch.setattr(warmup.time, "perf_counter", lambda: backend.now_s)
    identity = Identity(role="drafter", **backend.identity._asdict())
    run_all(time_drafts(backend, identity))
    assert not backend.is_open
    return identity.pass_times


def test_the_time_of_a_draft_is_the_least_of_warm_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft compiles; a slow drafter is timed once, a quick one a few times."""
    assert timed(Clocked(), 0.1, monkeypatch).chains[1] == pytest.approx(30.0)
    assert timed(Clocked(), 2.0, monkeypatch).chains[1] == pytest.approx(20.0)
    assert not timed(Clocked(longest=0), 2.0, monkeypatch).chains
    assert not timed(silent := Clocked(model=""), 2.0, monkeypatch).chains
    assert not silent.drafts


def test_a_drafters_hello_has_the_time_of_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any request, of a drafter here, behind a socket, and of one that is relayed."""
    hellos = []

    def shake(channel: Any, identity: Identity, drafter: Any, inbox: Any, done: Preparer) -> None:
        hellos.append(_hello(identity, done))

    monkeypatch.setattr(main, "serve", shake)
    backend, folder = MlxBackend(tiny_folder("llama"), 512), str(tiny_folder("llama"))
    address = "ipc:///tmp/nobody"
    settings = DrafterSettings(address=address, lifeline=0, backend="mlx", model=folder)
    main._serve(settings, backend, [Stage("drafts", backend.try_drafts)])
    assert hellos.pop().preparation.total == 4  # with a stage, drafts are timed again
    main._serve(settings, backend)
    [hello] = hellos
    assert hello.pass_times.chains[1] > 0.0
    assert hello.preparation.stage == "grammars"
    assert _identify(backend).pass_times.chains[1] > 0.0
    peer: Any = SimpleNamespace(backend="remote", name="a server")
    assert relay._identity(hello, peer).pass_times == hello.pass_times
