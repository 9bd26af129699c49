"""A drafter with a short context drafts on the most recent tokens of a long sequence."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.settings.settings import StackSettings
from protocol.decoding.sampler import sample
from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.errors import ProtocolError
from protocol.messages import Mode, Sampling, Tokens
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    BackendIdentity,
    Outcome,
    RoundOptions,
    Rows,
    TreeLayer,
)
from services.drafter.backends.mlx import MlxBackend
from services.drafter.sliding_context import SlidingContextBackend
from tests.support.reference import drafts, reference, said, tiny_folder
from tests.support.stack import Answered, RunningStack, running
from tests.support.tiny_models import write_tiny_model

CONTEXT = 20


class Narrow:
    """A backend that counts what it is given, and refuses what does not fit its context."""

    def __init__(self) -> None:
        self.identity = BackendIdentity("fake", "", "", 0, CONTEXT, "cpu", 64)
        self.held: dict[int, Tokens] = {}
        self.turns: list[RoundOptions] = []
        self.prefills = 0

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        del sampling
        assert len(tokens) <= CONTEXT
        assert sequence not in self.held
        self.prefills += 1
        yield
        self.held[sequence] = list(tokens)

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        held = self.held[sequence]
        assert 0 <= base <= len(held)
        held[base:] = tokens
        assert len(held) <= CONTEXT

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        del fan_out
        assert len(self.held[sequence]) + len(tree) + depth <= CONTEXT
        self.turns.append(options)
        for _ in range(depth):
            yield TreeLayer([Outcome(0, 1)], [len(self.held[sequence]) + options.shift], [0.5])

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer | None]:
        del pending
        assert len(self.held[sequence]) + 1 + count <= CONTEXT
        self.turns.append(options)
        for _ in range(count):
            yield TreeLayer([], [len(self.held[sequence]) + options.shift], [0.5])

    def close(self, sequence: int) -> None:
        self.held.pop(sequence, None)


ROUNDS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.booleans()), max_size=25)


@given(st.integers(0, 70), ROUNDS, st.integers(0, 30))
def test_the_backend_has_the_last_tokens(
    prompt: int, rounds: list[tuple[int, int, bool]], rewind: int
) -> None:
    """Never more than its context, always the sequence's end, and the shift says where it begins.

    Work may be abandoned at any pause, and the sequence may be rewound.
    """
    inner = Narrow()
    backend = SlidingContextBackend(inner)
    tokens = list(range(prompt))
    said(backend.open(1, tokens, Sampling()))
    rewound = False
    for accepted, ahead, abandoned in rounds:
        rewound = rewound or abandoned
        news = list(range(1000, 1000 + accepted + 1))
        base = max(0, len(tokens) - (rewind if abandoned else 0))
        backend.commit(1, base, news)
        tokens[base:] = news
        work: Iterator[object] = (
            backend.prepare(1, read_tree([7] * (1 + accepted)), [1], ahead, RoundOptions(3, 2))
            if ahead % 2
            else backend.draft(1, 7, ahead, RoundOptions(3, 2))
        )
        next(work, None)
        if abandoned:
            continue
        list(work)
        if 1 + accepted + ahead > CONTEXT // 2:
            continue
        held = inner.held[1]
        assert tokens[len(tokens) - len(held) :] == held
        assert rewound or len(held) >= min(len(tokens), CONTEXT // 2)
        if inner.turns:
            assert inner.turns[-1][:2] == (3, 2)
            assert ahead == 0 or len(tokens) == inner.turns[-1].shift + len(held)


def test_it_is_opened_anew_rarely() -> None:
    """A prefill buys half a context of tokens."""
    inner = Narrow()
    backend = SlidingContextBackend(inner)
    said(backend.open(1, [1], Sampling()))
    for position in range(1, 101):
        backend.commit(1, position, [5])
        assert len(said(backend.prepare(1, read_tree([7]), [1], 4))) == 4
    assert 8 <= inner.prefills <= 20


class Reader(Narrow):
    """One that reads the target: what it was told at each position since it was opened last."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[int, float] = {}

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        self.told.clear()
        yield from super().open(sequence, tokens, sampling)

    def read(self, sequence: int, first: int, rows: Rows) -> None:
        assert sequence in self.held
        assert first >= 0
        self.told |= {first + place: float(row[0]) for place, row in enumerate(rows)}


def test_states_come_with_the_tokens_that_are_given_again() -> None:
    """A state is told at the position that its token has in the window, however it is moved."""
    inner = Reader()
    backend = SlidingContextBackend(inner)
    said(backend.open(1, list(range(30)), Sampling()))
    backend.read(1, 0, np.arange(30.0)[:, None])
    for position in range(30, 100):
        backend.commit(1, position, [position])
        backend.read(1, position, np.array([[float(position)]]))
        said(backend.prepare(1, read_tree([7]), [1], 4))
        assert inner.told == dict(enumerate(map(float, inner.held[1])))


def test_states_that_come_while_nothing_is_drafted_do_not_pile_up() -> None:
    """A long answer in a pause: those that the next window has are kept, and no others."""
    inner = Reader()
    backend = SlidingContextBackend(inner)
    said(backend.open(1, list(range(30)), Sampling()))
    for position in range(30, 300):
        backend.read(1, position, np.array([[float(position)]]))
    assert len(backend._windows[1].states) == CONTEXT
    backend.commit(1, 30, list(range(30, 300)))
    said(backend.prepare(1, read_tree([7]), [1], 4))
    assert inner.told == dict(enumerate(map(float, inner.held[1])))


def test_what_no_window_holds_is_not_drafted() -> None:
    """A round longer than half a context gets nothing, and nothing breaks."""
    backend = SlidingContextBackend(Narrow())
    said(backend.open(1, [1, 2, 3], Sampling()))
    assert said(backend.prepare(1, read_tree([7] * 8), [1], 8)) == []
    assert drafts(backend.draft(1, 7, CONTEXT)) == []
    assert len(drafts(backend.draft(1, 7, 2))) == 2


def test_it_has_no_limit_of_its_own() -> None:
    """The handshake promises any context; everything else is the backend's own identity."""
    inner = Narrow()
    identity = SlidingContextBackend(inner).identity
    assert identity.context_length == 0
    assert inner.identity == identity._replace(context_length=CONTEXT)


def test_sequences_are_told_apart() -> None:
    """Closing one frees the backend's; asking for a closed one is an error."""
    inner = Narrow()
    backend = SlidingContextBackend(inner)
    for sequence in (1, 2):
        said(backend.open(sequence, [sequence], Sampling()))
    backend.close(1)
    assert set(inner.held) == {2}
    with pytest.raises(ProtocolError, match="sequence 1 is not open"):
        backend.commit(1, 0, [])
    backend.commit(2, 1, [5])
    assert inner.held[2] == [2, 5]


SAMPLED = Sampling(temperature=0.9, seed=4)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_the_noise_is_that_of_the_sequences_positions(sampling: Sampling) -> None:
    """On a window the neural backend says what its model says, with the target's own noise."""
    inner = MlxBackend(tiny_folder("llama"), prefill_step_size=50)
    inner.identity = inner.identity._replace(context_length=32)
    backend = SlidingContextBackend(inner)
    tokens = [3 + (7 * i) % 251 for i in range(100)]
    said(backend.open(1, tokens, sampling))
    [found] = drafts(backend.draft(1, 9, 1))
    window = [*tokens[-16:], 9]
    row = reference("llama").rows([window])[0][-1:]
    assert sample(row, [len(tokens) + 1], sampling) == [found.token]
    layers = said(backend.prepare(1, read_tree([9]), [3], 2))
    path = [*window, layers[0].outcomes[0].bonus]
    assert sample(row, [len(tokens) + 1], sampling) == path[-1:]
    for depth, layer in enumerate(layers):
        row = reference("llama").rows([path])[0][-1:]
        expected = sample(np.asarray(row), [len(tokens) + 2 + depth], sampling)
        assert expected == layer.tokens[:1]
        path += layer.tokens[:1]


def make_nearsighted(file: Path) -> None:
    """Let attention matter little: a window then holds what matters."""
    weights: Any = mx.load(str(file))
    for key in [key for key in weights if key.endswith("o_proj.weight")]:
        weights[key] = 0.02 * weights[key]
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A target with a context of 512, and a close drafter that knows 64."""
    folder: Path = tmp_path_factory.mktemp("pair")
    short = {"max_position_embeddings": 64}
    target = write_tiny_model(folder / "target", "llama", seed=3)
    draft = write_tiny_model(folder / "draft", "llama", seed=3, noise=0.01, config=short)
    for model in (target, draft):
        make_nearsighted(model / "model.safetensors")
    with running(StackSettings(model=str(target), draft_model=str(draft))) as started:
        started.warm_up()
        yield started


@pytest.mark.processes
@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_accepted_beyond_the_drafters_context(
    stack: RunningStack, sampling: Sampling
) -> None:
    """Far behind the drafter's context, with the tokens of plain decoding, drafts still stand."""
    prompt = [3 + (7 * i) % 251 for i in range(150)]

    def answer(mode: Mode, num_draft_tokens: int = 0) -> Answered:
        return stack.answer(
            "",
            tokens=prompt,
            mode=mode,
            sampling=sampling,
            max_tokens=120,
            num_draft_tokens=num_draft_tokens,
        )

    plain = answer("ar")
    drafted = stack.until(
        lambda answer: answer.statistics.drafted > 0,
        "drafts come in time",
        lambda: answer("ssd", num_draft_tokens=3),
    )
    assert plain.tokens == drafted.tokens
    assert drafted.statistics.fallbacks.get("no_drafter", 0) == 0
    assert drafted.statistics.acceptance_rate > 0.5
