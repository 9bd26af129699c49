"""First depths that wait for their branches: the drafts are those of asking for them."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from orchestrator.sequence.limits import Limits
from protocol.decoding.token_tree import read_tree
from protocol.messages import Sampling
from services.drafter.backends import mlx_prelaunch, mlx_rounds
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.mlx_prelaunch import PrelaunchingBackend
from services.drafter.backends.mlx_rounds import RoundPrelauncher
from services.mlx.loader import load
from services.runtime.preparation import run_all
from services.verifier.verifier import Verifier
from tests.properties import examples
from tests.services.drafter.backends import test_mlx_trees
from tests.services.drafter.backends.fake_branch_doorbell import FakeBranchDoorbell
from tests.services.drafter.backends.test_mlx import PROMPT, SCRIPT, Line, Round, Setup, rounds
from tests.services.drafter.backends.test_mlx_ahead import LEAVES, as_on_a_gpu
from tests.services.drafter.backends.test_mlx_rows import trace
from tests.support.lockstep import Lockstep
from tests.support.reference import SAMPLINGS, Reference, plain, said, tiny_folder

pytestmark = pytest.mark.usefixtures("all_candidates")


@cache
def backend_of(family: str) -> PrelaunchingBackend:
    """The code path of a GPU of its own, computed here on a CPU."""
    with patch("tests.services.drafter.backends.test_mlx_ahead.MlxBackend", PrelaunchingBackend):
        backend = as_on_a_gpu(tiny_folder(family))
    assert isinstance(backend, PrelaunchingBackend)
    trace(backend)
    return backend


def setup_of(family: str, is_late: Callable[[], bool] = lambda: False) -> Setup:
    """A backend whose rounds are prelaunched, with a new doorbell."""
    backend = backend_of(family)
    ahead = backend.ahead
    assert ahead is not None
    assert ahead.traced is not None
    bell = FakeBranchDoorbell(is_late)
    backend.rounds = RoundPrelauncher(ahead.traced.forward, bell, ahead.ids)
    return Setup(backend, Reference(tiny_folder(family)))


@pytest.fixture(autouse=True)
def _traced_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a doorbell here returns is no input of a trace; and CPUs may take long."""
    monkeypatch.setattr(RoundPrelauncher, "compiler", staticmethod(lambda compute: compute))
    monkeypatch.setattr(mlx_rounds, "_SAFE_S", float("inf"))


def bell_of(backend: MlxBackend) -> FakeBranchDoorbell:
    assert isinstance(backend, PrelaunchingBackend)
    assert backend.rounds is not None
    bell = backend.rounds._bell
    assert isinstance(bell, FakeBranchDoorbell)
    return bell


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_drafts_equal_fresh_drafting(family: str, sampling: Sampling) -> None:
    """Every branch and draft of many rounds in a row is that of a fresh start from its prefix."""
    setup = setup_of(family)
    line = Line(setup, sampling)
    for played in SCRIPT:
        line.play(replace(played, layers=played.depth + 1))
    setup.backend.close(line.number)
    bell = bell_of(setup.backend)
    assert bell.waiting is None
    assert bell.rung >= 3 or sampling.acceptance == "rejection"


@examples(60, phases=(Phase.generate,))
@given(
    sampling=st.sampled_from(list(SAMPLINGS.values())),
    script=st.lists(rounds, min_size=1, max_size=8),
    data=st.data(),
)
def test_random_rounds_equal_fresh_drafting(
    sampling: Sampling, script: list[Round], data: st.DataObject
) -> None:
    """So are those of random fan-outs, depths, outcomes, interruptions and rewinds."""
    setup = setup_of("llama")
    line = Line(setup, sampling)
    for played in script:
        more = data.draw(st.booleans())
        line.play(replace(played, layers=9) if more else played)
    setup.backend.close(line.number)
    assert bell_of(setup.backend).waiting is None


HITS = [Round(depth=3, layers=4, accepted=at % 3, hit=0, follow=3) for at in range(12)]
"""Each outcome was prepared."""
MISSES = [Round(depth=3, layers=4, accepted=at % 3, hit=None) for at in range(6)]
DRAFTS = [Round(draft=True, depth=3, layers=4), Round(depth=3, layers=4, accepted=2)]


@pytest.mark.parametrize("script", [HITS, MISSES, DRAFTS * 4], ids=["hits", "misses", "drafts"])
def test_each_round_rings(script: list[Round]) -> None:
    """And the tokens of all of them are in their places afterwards."""
    setup = setup_of("llama")
    line = Line(setup, Sampling())
    for played in script:
        line.play(played)
    bell = bell_of(setup.backend)
    assert (bell.rung, bell.called_off) == (len(script), 0)
    trunk = setup.backend._sequences[line.number]
    assert not trunk.scattered
    assert trunk.store.length == len(trunk.tokens)
    setup.backend.close(line.number)
    assert bell.called_off == 1


@pytest.mark.parametrize("script", [HITS, MISSES, DRAFTS], ids=["hits", "misses", "drafts"])
def test_what_was_rung_for_too_late_is_not_told(script: list[Round]) -> None:
    """The passes gave up: nothing is said of them, and the next round is right."""
    late = [False, True]
    setup = setup_of("llama", lambda: bool(late) and late.pop(0))
    line, backend = Line(setup, Sampling()), setup.backend
    line.play(script[0])
    backend.commit(line.number, line.news_from, line.committed[line.news_from :])
    line.news_from = len(line.committed)
    if script is DRAFTS:
        assert said(backend.draft(line.number, line.pending, 3)) == []
    else:
        chain = [line.pending, *line.next_draft]
        assert said(backend.prepare(line.number, read_tree(chain), [2, 2, 1], 2)) == []
    assert bell_of(backend).rung == 2
    line.play(script[1])
    backend.close(line.number)


def test_passes_that_miss_too_often_are_no_longer_launched() -> None:
    setup = setup_of("llama", lambda: True)
    backend = setup.backend
    list(backend.open(1, list(PROMPT), Sampling()))
    layers = [said(backend.prepare(1, read_tree([120, 7]), [2, 2], 2)) for _ in range(8)]
    assert [len(told) for told in layers] == [0] * 6 + [2, 2]
    assert bell_of(backend).rung == 6
    backend.close(1)


def test_passes_that_may_have_given_up_are_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_rounds, "_SAFE_S", -1.0)
    setup = setup_of("llama")
    line = Line(setup, Sampling())
    for played in HITS[:3]:
        line.play(played)
    bell = bell_of(setup.backend)
    assert (bell.rung, bell.called_off) == (3, 2)
    setup.backend.close(line.number)


def test_another_sequence_calls_them_off() -> None:
    setup = setup_of("llama")
    first, second = Line(setup, Sampling()), Line(setup, Sampling(temperature=0.9, seed=2))
    for played in HITS[:4]:
        first.play(played)
        second.play(played)
    bell = bell_of(setup.backend)
    assert (bell.rung, bell.called_off) == (8, 7)
    for line in (first, second):
        setup.backend.close(line.number)
    assert bell.waiting is None


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_branches_behind_trees(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_mlx_trees, "OPTIONS", LEAVES)
    setup, tree = setup_of("llama"), test_mlx_trees.FIRST
    line = test_mlx_trees.Line(setup, sampling)
    for place in (5, 3, 0):
        grown = line.prepare(tree, [row % 2 for row in range(len(tree))], 3)
        line.go_on(tree, grown.outcomes[place % len(grown.outcomes)])
        tree = test_mlx_trees.next_tree(grown, place % len(grown.outcomes), 9)
    setup.backend.close(line.number)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_an_answer_is_that_of_plain_decoding(sampling: Sampling) -> None:
    """Nearly every outcome is a hit, and what is drafted next starts from its round."""
    length, setup = 60, setup_of("llama")
    line = Lockstep(
        Verifier(load(tiny_folder("llama")), 512),
        setup.backend,
        list(PROMPT),
        Limits(length, frozenset(), 0),
        num_draft_tokens=3,
        branches=8,
        sampling=sampling,
    )
    statistics = line.run()
    assert line.sequence.tokens[len(PROMPT) :] == plain("llama", PROMPT, length, sampling)
    assert statistics.rounds < length / 2
    rung = bell_of(setup.backend).rung
    assert rung >= 0.8 * statistics.rounds or sampling.acceptance == "rejection"


@pytest.mark.parametrize("wrong", [False, True])
def test_they_are_used_where_they_change_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, wrong: bool
) -> None:
    """At load all shapes are tried."""
    backend, bell = backend_of("llama"), FakeBranchDoorbell()
    if wrong:
        right = np.unpackbits
        monkeypatch.setattr(np, "unpackbits", lambda *a, **k: right(*a, **k) & 0)
    monkeypatch.setattr(mlx_prelaunch, "open_branch_doorbell", lambda: bell)
    monkeypatch.setattr(mlx_rounds, "_LONGEST_MS", 1e9)
    monkeypatch.setattr(mlx_rounds, "_PATH", 4)
    backend.rounds = None
    run_all(backend.try_rounds())
    assert (backend.rounds is None) == wrong
    assert bell.waiting is None
    assert bell.rung > 10
    assert ("not used" in caplog.text) == wrong


@pytest.mark.parametrize(("round_ms", "passes"), [(2.0, 6), (5.0, 6), (7.6, 3), (12.0, 0)])
def test_a_round_of_a_slow_drafter_has_fewer_passes(round_ms: float, passes: int) -> None:
    """The device cannot go on to the next one before its end."""
    setup = setup_of("llama")
    assert isinstance(setup.backend, PrelaunchingBackend)
    rounds = setup.backend.rounds
    assert rounds is not None
    assert rounds.fit_length(round_ms) == bool(passes)
    assert rounds.passes == passes or not passes
