"""What the verifier sends a drafter that reads the target."""

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.errors import ModelError
from protocol.messages import (
    FeatureRequest,
    Features,
    FromService,
    OpenSequence,
    Prefilled,
    ReadTarget,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.engine import runner
from services.engine.batch import Shape
from services.engine.packing import enable_packing
from services.engine.prelaunch import Prelauncher
from services.engine.target_model import TargetModel, find_table
from services.engine.trace import Trace
from services.engine.traced_forward import TracedForward
from services.kernels.cuda.host_rows import SentRows, pending
from services.kv.cache import KVStore
from services.kv.prefix_cache import PrefixCache
from services.kv.rewinding import find_rewinding
from services.mlx.loader import load, windows_of
from services.mlx.taps import Taps
from services.runtime.inbox import Work
from services.runtime.preparation import run_all
from services.verifier.feature_log import FeatureLog
from services.verifier.verifier import Verifier
from tests.services.kernels.cuda.host import attend_gathered
from tests.services.verifier.fake_doorbell import FakeDoorbell
from tests.support.reference import tiny_folder

LAYERS = [0, 2]
REQUEST = FeatureRequest(layers=LAYERS, dtype="float32")
PROMPT = [0, 2, 97, 41, 250, 33, 8, 141, 77, 19]


def new_verifier(request: FeatureRequest | None = REQUEST, **options: PrefixCache) -> Verifier:
    verifier = Verifier(load(tiny_folder("llama")), 4, **options)
    if request is not None:
        assert answers(verifier, ReadTarget(features=request)) == []
    return verifier


def replaying_verifier() -> Verifier:
    """Its passes over few tokens are replays of traces, as on a GPU."""
    loaded = load(tiny_folder("llama"))
    model = loaded.module
    enable_packing(model)
    states, windows = find_rewinding(model, bucketed=False), windows_of(model)

    def make() -> KVStore:
        return KVStore(windows, bucketed=False)

    traced = TracedForward(model)
    for rows in (1, 3):
        traced.prepare(Shape(rows, 256), make)
    traced.prepare(Shape(8, 256, forks=True), make)
    table = run_all(find_table(model, states.make, attend_gathered))
    assert table is not None
    table._traced = Trace(model, attend=attend_gathered)
    target = TargetModel(
        verify=model,
        prefill=model,
        states=states,
        bucketed=False,
        shares_passes=True,
        takes_trees=True,
        table=table,
        pipelines=False,
        traced=traced,
    )
    verifier = Verifier(loaded, 4, target=target)
    assert answers(verifier, ReadTarget(features=REQUEST)) == []
    return verifier


class LateRows(SentRows):
    """There when somebody looks: the pass may wait until then."""

    def __init__(self, rows: mx.array) -> None:
        self._late, self.sent = rows, mx.ones(1)

    def __getitem__(self, rows: slice) -> SentRows:
        return LateRows(self._late[rows])

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> Any:
        return np.array(self._late)


def prelaunching_verifier() -> Verifier:
    """Its passes are launched before their tokens are known, those behind trees too."""
    verifier = replaying_verifier()
    traced = verifier.target.traced
    assert traced is not None
    traced.tree_rows = (8,)
    verifier.scheduler.prelauncher = Prelauncher(verifier.scheduler.runner, FakeDoorbell())
    host: Any = SimpleNamespace(send=LateRows)
    verifier.features._host = host
    return verifier


either = pytest.mark.parametrize(
    "new",
    [
        new_verifier,
        pytest.param(replaying_verifier, marks=pytest.mark.kernel),
        pytest.param(prelaunching_verifier, marks=pytest.mark.kernel),
    ],
)
New = Callable[[], Verifier]


def answers(verifier: Verifier, message: Work) -> list[FromService]:
    return [answer for answer in verifier.handle(message) if answer is not None]


def open_sequence(verifier: Verifier, tokens: Tokens, number: int = 1) -> list[FromService]:
    return answers(verifier, OpenSequence(sequence=number, tokens=tokens, sampling=Sampling()))


@cache
def expected(tokens: tuple[int, ...]) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """[tokens, width] by one pass over all of them."""
    model = load(tiny_folder("llama")).module
    taps = Taps(model, LAYERS)
    model(mx.array([tokens]))
    return np.array(taps.features()[0].astype(mx.float32))


def check(sent: list[FromService], tokens: Tokens, first: int = 0) -> None:
    """These messages are the features of tokens[first:], in order and without a hole."""
    rows, position = [], first
    for message in sent:
        if isinstance(message, Features):
            assert message.first == position
            position += message.count
            rows.append(np.frombuffer(message.data, np.float32).reshape(message.count, -1))
    assert position == len(tokens)
    found = np.concatenate(rows)
    np.testing.assert_allclose(found, expected(tuple(tokens))[first:], atol=1e-2)


@either
def test_a_prompt_and_what_is_committed(new: New) -> None:
    """All states of the prompt before Prefilled, those of committed tokens before the outcome."""
    verifier = new()
    *sent, last = open_sequence(verifier, PROMPT)
    assert isinstance(last, Prefilled)
    check(sent, PROMPT)
    position, committed = len(PROMPT), list(PROMPT)
    for chain in ([64, 5, 120], [7]):
        verify = Verify(sequence=1, round=1, position=position, nodes=chain)
        *sent, outcome = answers(verifier, verify)
        assert isinstance(outcome, VerificationOutcome)
        committed += chain[: outcome.accepted + 1]
        check(sent, committed, position)
        position = len(committed)


def test_passes_are_launched_beforehand_though_the_target_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where what is read comes by itself; an array would have to be waited for."""
    awaited = list[Any]()
    monkeypatch.setattr(runner, "pending", lambda rows: awaited.append(rows) or pending(rows))
    waiting = replaying_verifier()
    waiting.features._host = None
    for verifier, rung in ((prelaunching_verifier(), 2), (waiting, 0)):
        bell = FakeDoorbell()
        prelauncher = verifier.scheduler.prelauncher or Prelauncher(verifier.scheduler.runner)
        verifier.scheduler.prelauncher = prelauncher
        prelauncher._bell = bell
        open_sequence(verifier, PROMPT)
        position = len(PROMPT)
        for number in range(3):
            verify = Verify(sequence=1, round=number, position=position, nodes=[7])
            *sent, outcome = answers(verifier, verify)
            assert isinstance(outcome, VerificationOutcome)
            assert len(sent) == 1
            position += 1
        assert bell.rung == rung
        waiting = prelauncher._waiting
        if waiting is not None:
            assert isinstance(waiting.features, LateRows)
            assert any(rows.sent is waiting.features.sent for rows in awaited)


@either
def test_of_a_tree_the_path_that_stands_is_sent(new: New) -> None:
    """The states of a side branch's tokens, in the order of their positions."""
    verifier, position = new(), len(PROMPT)
    open_sequence(verifier, PROMPT)
    right: Tokens = []
    for _ in range(3):  # what the target says after 64, one row a pass
        plain = new_verifier(None)
        open_sequence(plain, [*PROMPT, 64, *right][:-1])
        last = [*PROMPT, 64, *right][-1:]
        asked = Verify(sequence=1, round=1, position=position + len(right), nodes=last)
        [one] = answers(plain, asked)
        assert isinstance(one, VerificationOutcome)
        right.append(one.bonus)
    wrong = (right[0] + 1) % 288
    nodes = [64, wrong, right[0], wrong + 1, right[1]]
    tree = Verify(sequence=1, round=1, position=position, nodes=nodes, parents=[0, 0, 1, 2])
    *sent, outcome = answers(verifier, tree)
    assert isinstance(outcome, VerificationOutcome)
    assert (outcome.node, outcome.accepted, outcome.bonus) == (4, 2, right[2])
    check(sent, [*PROMPT, 64, *right[:2]], position)


def test_nothing_is_sent_unasked() -> None:
    """Without a request, and after it was taken back, messages are as they were."""
    verifier = new_verifier(None)
    [prefilled] = open_sequence(verifier, PROMPT)
    assert isinstance(prefilled, Prefilled)
    assert answers(verifier, ReadTarget(features=REQUEST)) == []  # nothing was read yet
    assert answers(verifier, ReadTarget()) == []
    verify = Verify(sequence=1, round=1, position=len(PROMPT), nodes=[7])
    [outcome] = answers(verifier, verify)
    assert isinstance(outcome, VerificationOutcome)
    assert not hasattr(load(tiny_folder("llama")).module.layers[0], "tap")


def test_a_drafter_that_comes_later_gets_all() -> None:
    """The same request again sends what is kept of every open sequence."""
    verifier = new_verifier()
    open_sequence(verifier, PROMPT)
    open_sequence(verifier, PROMPT[:5], number=2)
    outcome = answers(verifier, Verify(sequence=1, round=1, position=len(PROMPT), nodes=[7]))[-1]
    assert isinstance(outcome, VerificationOutcome)
    sent = answers(verifier, ReadTarget(features=REQUEST))
    check([m for m in sent if isinstance(m, Features) and m.sequence == 1], [*PROMPT, 7])
    check([m for m in sent if isinstance(m, Features) and m.sequence == 2], PROMPT[:5])


def test_states_stay_with_the_kv() -> None:
    """A prompt that begins like an earlier one is not computed again, and its states are sent."""
    verifier = new_verifier(prompts=PrefixCache(4, 1 << 30))
    open_sequence(verifier, PROMPT)
    longer = [*PROMPT, 5, 6, 7]
    *sent, prefilled = open_sequence(verifier, longer)  # the same number: the old one is retired
    assert isinstance(prefilled, Prefilled)
    assert prefilled.cached == len(PROMPT)
    check(sent, longer)


def interleave(*generators: Iterator[FromService | None]) -> list[FromService]:
    """Steps in turns, as the loop takes them."""
    found: list[FromService] = []
    waiting = list(generators)
    while waiting:
        for one in list(waiting):
            try:
                answer = next(one)
            except StopIteration:
                waiting.remove(one)
                continue
            found += [answer] if answer is not None else []
    return found


@either
def test_sequences_of_one_pass_get_their_own(new: New) -> None:
    """Two chains in one pass: each sequence's states, as if it were alone."""
    verifier = new()
    other = PROMPT[::-1]
    open_sequence(verifier, PROMPT, 1)
    open_sequence(verifier, other, 2)
    sent = interleave(
        verifier.handle(Verify(sequence=1, round=1, position=len(PROMPT), nodes=[64])),
        verifier.handle(Verify(sequence=2, round=1, position=len(other), nodes=[5])),
    )
    outcomes = [m for m in sent if isinstance(m, VerificationOutcome)]
    assert {m.sequences for m in outcomes} == {2}
    for number, tokens in ((1, [*PROMPT, 64]), (2, [*other, 5])):
        check([m for m in sent if m.sequence == number], tokens, len(tokens) - 1)  # type: ignore[union-attr]


@either
@pytest.mark.parametrize("crowd", [1, 2])
def test_tokens_that_come_unasked_are_read_too(new: New, crowd: int) -> None:
    """Their passes begin before anybody has read the tokens before them."""
    verifier = new()
    verifier.scheduler.pipelines = True
    prompts = {1: PROMPT, 2: PROMPT[::-1]}
    asked = []
    for number in range(1, 1 + crowd):
        open_sequence(verifier, prompts[number], number)
        position = len(prompts[number])
        asked.append(Verify(sequence=number, round=1, position=position, nodes=[64], granted=5))
    sent = interleave(*map(verifier.handle, asked))
    for number in range(1, 1 + crowd):
        outcomes = [m for m in sent if isinstance(m, VerificationOutcome) and m.sequence == number]
        assert len(outcomes) == 6
        committed = [*prompts[number], 64, *(outcome.bonus for outcome in outcomes)]
        own = [m for m in sent if isinstance(m, Features) and m.sequence == number]
        check(list(own), committed[:-1], len(prompts[number]))


@either
def test_a_run_goes_on_when_another_drafter_reads(new: New) -> None:
    """What has begun for the one before is not sent to it."""
    verifier = new()
    verifier.scheduler.pipelines = True
    open_sequence(verifier, PROMPT)
    run = verifier.handle(Verify(sequence=1, round=1, position=len(PROMPT), nodes=[64], granted=5))
    for answer in run:
        if isinstance(answer, VerificationOutcome):
            break
    other = FeatureRequest(layers=[1], dtype="float32")
    assert answers(verifier, ReadTarget(features=other, number=2)) == []
    sent = [answer for answer in run if answer is not None]
    widths = [
        len(answer.data) // (4 * answer.count) for answer in sent if isinstance(answer, Features)
    ]
    assert [answer.request for answer in sent if isinstance(answer, Features)] == [2] * 5
    assert len(set(widths)) == 1
    assert widths[0] * 2 == len(expected((1, 2))[0])


def test_a_shared_pass_for_another_drafter_is_not_sent() -> None:
    """One sequence computes it, the other takes its part when somebody else reads."""
    verifier = new_verifier()
    open_sequence(verifier, PROMPT, 1)
    open_sequence(verifier, PROMPT[::-1], 2)
    first, second = (
        verifier.handle(Verify(sequence=number, round=1, position=len(PROMPT), nodes=[64]))
        for number in (1, 2)
    )
    assert next(first) is next(second) is None  # both wait for company
    assert any(isinstance(answer, VerificationOutcome) for answer in first)
    other = FeatureRequest(layers=[1], dtype="float32")
    answers(verifier, ReadTarget(features=other, number=2))
    [outcome] = [answer for answer in second if answer is not None]
    assert isinstance(outcome, VerificationOutcome)
    assert outcome.sequences == 2


def test_a_projection_is_applied(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With `fc.weight` of a file, so many numbers a token travel; another width is refused."""
    path = tmp_path_factory.mktemp("p") / "fc.safetensors"
    width = expected(tuple(PROMPT)).shape[1]
    weight = np.random.default_rng(0).standard_normal((3, width)).astype(np.float32)
    mx.save_safetensors(str(path), {"fc.weight": mx.array(weight)})
    request = FeatureRequest(layers=LAYERS, projection=str(path), dtype="float32")
    sent = open_sequence(new_verifier(request), PROMPT)
    rows = [
        np.frombuffer(m.data, np.float32).reshape(-1, 3) for m in sent if isinstance(m, Features)
    ]
    wanted = expected(tuple(PROMPT)) @ weight.T
    np.testing.assert_allclose(np.concatenate(rows), wanted, atol=0.05)
    mx.save_safetensors(str(path), {"fc.weight": mx.zeros((3, 5))})
    with pytest.raises(ModelError, match="takes 5 numbers"):
        new_verifier(request)


def test_what_cannot_be_read_is_refused() -> None:
    """Layers that do not exist, with a sentence; verification goes on without states."""
    verifier = new_verifier(None)
    with pytest.raises(ModelError, match="layers 0 to 2"):
        answers(verifier, ReadTarget(features=FeatureRequest(layers=[7])))
    [prefilled] = open_sequence(verifier, PROMPT)
    assert isinstance(prefilled, Prefilled)


def test_a_log_keeps_the_last_rows() -> None:
    """The window's rows and no block more; a hole begins anew; forks and cuts do not mix."""
    log = FeatureLog(FeatureRequest(layers=[0], window=4))
    rows = np.arange(20, dtype=np.float32).reshape(10, 2)
    for position in range(0, 8, 2):
        log.append(position, rows[position : position + 2])
    assert (log.first, log.end) == (4, 8)
    fork = log.fork(7)
    log.append(7, rows[9:])  # another token at position 7
    assert [first for first, _ in log.blocks(16)] == [4, 6]
    np.testing.assert_array_equal(np.concatenate([b for _, b in log.blocks(99)])[-1], rows[9])
    np.testing.assert_array_equal(np.concatenate([b for _, b in fork.blocks(99)]), rows[4:7])
    fork.append(9, rows[9:])
    assert (fork.first, fork.end) == (9, 10)
    fork.trim(3)
    assert (fork.first, fork.end, fork.blocks(9)) == (3, 3, [])
