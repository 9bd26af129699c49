"""Several sequences in one forward pass: each gets what it gets alone."""

from collections.abc import Callable
from functools import cache, partial
from itertools import count
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.token_tree import read_tree
from protocol.errors import OutOfMemory
from protocol.messages import (
    CloseSequence,
    OpenSequence,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.drafter.backends.mlx import MlxBackend
from services.engine import runner
from services.engine.batch import BatchPart
from services.engine.pass_handle import AheadPass, PassQueue, Submission
from services.engine.runner import ModelRunner
from services.engine.scheduler import follow
from services.engine.target_model import supports_packing
from services.kv.cache import KVStore
from services.mlx.loader import load, windows_of
from services.runtime.preparation import run_all
from services.verifier.verifier import Verifier
from tests.properties import examples
from tests.support.reference import SAMPLINGS, for_the_cpu, plain, said, tiny_folder, tiny_verifier
from tests.support.tiny_models import DRAFTERS, FAMILIES, SLOTTED

ALONE = {"gemma2", "dynamic"}
"""Attention written out for arrays; RoPE that takes no array of positions."""
PROMPTS: list[tuple[int, ...]] = [
    (11, 200),
    (0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64, 5, 120, 31, 88, 160, 3),
    (7,),
    (64, 5, 120, 31, 88, 160, 3, 9, 9, 10),
]
LENGTH = 24
NUMBERS = count(1)


@cache
def verifier_of(family: str) -> Verifier:
    return tiny_verifier(family)


class Stream:
    """One open sequence and the tokens that plain decoding has for it."""

    def __init__(self, family: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        self.number = next(NUMBERS)
        self.committed = list(prompt)
        self.rest = plain(family, prompt, LENGTH, sampling)
        self.round = 0
        opening = OpenSequence(sequence=self.number, tokens=list(prompt[:-1]), sampling=sampling)
        said(verifier_of(family).handle(opening))

    def submit(self, right: int, wrong: int) -> Verify:
        """A draft with so many right tokens, then wrong ones."""
        right = min(right, len(self.rest) - 1)
        others = [(token + 1) % 288 for token in [*self.rest, *self.rest][right : right + wrong]]
        self.round += 1
        return Verify(
            sequence=self.number,
            round=self.round,
            position=len(self.committed) - 1,
            nodes=[self.committed[-1], *self.rest[:right], *others],
        )

    def check(self, asked: Verify, right: int, outcome: VerificationOutcome) -> None:
        right = min(right, len(self.rest) - 1)
        assert (asked.sequence, asked.round) == (outcome.sequence, outcome.round)
        assert (right, self.rest[right]) == (outcome.accepted, outcome.bonus)
        self.committed += self.rest[: right + 1]
        self.rest = self.rest[right + 1 :]


def verify_together(verifier: Verifier, asked: list[Verify]) -> list[VerificationOutcome]:
    """All messages wait before the first pass begins."""
    work = [verifier.handle(message) for message in asked]
    assert [next(answers) for answers in work] == [None] * len(work)
    outcomes = [outcome for answers in work for outcome in said(answers)]
    assert all(isinstance(outcome, VerificationOutcome) for outcome in outcomes)
    return [outcome for outcome in outcomes if isinstance(outcome, VerificationOutcome)]


Draft = tuple[int, int]
draft: st.SearchStrategy[Draft] = st.tuples(st.integers(0, 4), st.integers(0, 3))


def check_rounds(family: str, samplings: list[Sampling], rounds: list[list[Draft]]) -> None:
    verifier = verifier_of(family)
    streams = [Stream(family, prompt, law) for prompt, law in zip(PROMPTS, samplings, strict=True)]
    for drafts in rounds:
        # Streams whose known text is over, and those that sit this round out, stay away.
        pairs = [
            (stream, size)
            for stream, size in zip(streams, drafts, strict=True)
            if stream.rest and size != (4, 3)
        ]
        asked = [stream.submit(*size) for stream, size in pairs]
        outcomes = verify_together(verifier, asked)
        for (stream, size), message, outcome in zip(pairs, asked, outcomes, strict=True):
            stream.check(message, size[0], outcome)
    for stream in streams:
        said(verifier.handle(CloseSequence(sequence=stream.number)))


@pytest.mark.parametrize("family", SLOTTED)
def test_a_shared_pass_changes_no_token(family: str) -> None:
    """Chains of unequal lengths and laws, some wrong, in one pass: tokens of plain decoding."""
    samplings = [*SAMPLINGS.values(), Sampling()]
    rounds = [
        [(0, 3), (2, 1), (1, 0), (0, 0)],
        [(3, 0), (0, 0), (0, 3), (1, 1)],
        [(0, 0), (0, 0), (0, 0), (0, 0)],
        [(1, 2), (3, 1), (2, 2), (3, 0)],
    ]
    check_rounds(family, samplings, rounds)


@examples(25)
@given(
    family=st.sampled_from(["llama", "sliding", "gemma3", "qwen2", "moe"]),
    samplings=st.tuples(*[st.sampled_from(list(SAMPLINGS.values()))] * 4).map(list),
    rounds=st.lists(st.tuples(*[draft] * 4).map(list), min_size=1, max_size=6),
)
def test_random_passes_change_no_token(
    family: str, samplings: list[Sampling], rounds: list[list[Draft]]
) -> None:
    """So do random ones; not every sequence is part of every pass."""
    check_rounds(family, samplings, rounds)


def test_a_pass_is_shared() -> None:
    """Four chains that wait at the same time are verified in one pass, as their outcomes say."""
    streams = [Stream("llama", prompt, Sampling()) for prompt in PROMPTS]
    asked = [stream.submit(size, 0) for size, stream in enumerate(streams)]
    outcomes = verify_together(verifier_of("llama"), asked)
    assert {(outcome.sequences, outcome.rows) for outcome in outcomes} == {(4, 10)}
    assert len({(outcome.verify_ms, outcome.idle_ms) for outcome in outcomes}) == 1


def test_a_pass_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is left for the next pass; a chain that is longer goes alone."""
    verifier = verifier_of("llama")
    monkeypatch.setattr(verifier.scheduler.queue, "most_rows", 16)  # a CPU's; a GPU has more
    streams = [Stream("llama", prompt, Sampling()) for prompt in PROMPTS]
    asked = [stream.submit(0, wrong) for stream, wrong in zip(streams, (6, 6, 20, 0), strict=True)]
    outcomes = verify_together(verifier, asked)
    found = [(outcome.sequences, outcome.rows) for outcome in outcomes]
    assert found == [(2, 14), (2, 14), (1, 21), (1, 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_tried_out(family: str) -> None:
    """Sequences share a pass wherever attention is mlx-lm's own and can be rewound."""
    module = load(tiny_folder(family)).module
    if family in SLOTTED:
        windows = windows_of(module)
        shares = run_all(supports_packing(module, lambda: KVStore(windows, bucketed=False)))
        assert shares == (family not in ALONE)


class Model:
    """The tiny llama, its caches, and a place where a pass can be broken."""

    def __init__(self) -> None:
        self.module: Any = load(tiny_folder("llama")).module
        self.windows = windows_of(self.module)
        assert run_all(supports_packing(self.module, self.store))
        self.calls: list[int] = []
        self.broken: Callable[[Tokens], bool] = lambda tokens: False

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        row: Any = tokens[0].tolist()
        self.calls.append(len(row))
        if self.broken(row):
            raise MemoryError("no room")
        logits: mx.array = self.module(tokens, cache=cache)
        return logits

    def submit(self, queue: PassQueue, store: KVStore, tokens: Tokens) -> Submission:
        count = len(tokens)
        return queue.submit(BatchPart(store, count, partial(store.chain, count), tokens))

    def store(self) -> KVStore:
        return KVStore(self.windows, bucketed=False)


@for_the_cpu
def test_a_shared_pass_has_the_same_bits() -> None:
    """On this CPU the logits do not depend on who else is in the pass, not even by rounding."""
    model = Model()
    chains: list[Tokens] = [[1, 2, 3, 4], [5], [6, 7, 8], [9, 10, 11, 12, 13, 14]]
    alone, shared = PassQueue(ModelRunner(model)), PassQueue(ModelRunner(model), 16)
    expected, found = [], []
    for tail in range(2):  # after a first pass the KV is of either kind
        chains = [[token + tail for token in chain] for chain in chains]
        if not tail:
            stores = [[model.store() for _ in chains] for _ in range(2)]
        expected += [
            np.array(alone.result(model.submit(alone, store, chain)).logits)
            for store, chain in zip(stores[0], chains, strict=True)
        ]
        asks = [
            model.submit(shared, store, chain)
            for store, chain in zip(stores[1], chains, strict=True)
        ]
        found += [np.array(shared.result(asked).logits) for asked in asks]
    assert model.calls[:5] == [4, 1, 3, 6, 14]
    for one, other in zip(expected, found, strict=True):
        assert one.tobytes() == other.tobytes()


def test_one_that_breaks_a_pass_breaks_no_other() -> None:
    """The others are computed without it, and only its own result raises."""
    model = Model()
    queue = PassQueue(ModelRunner(model), 16)
    stores = [model.store() for _ in range(3)]
    asks = [
        model.submit(queue, store, tokens)
        for store, tokens in zip(stores, [[1, 2], [13], [3]], strict=True)
    ]
    model.broken = lambda tokens: 13 in tokens
    expected = np.array(model.module(mx.array([[1, 2]]))[0])
    np.testing.assert_allclose(np.array(queue.result(asks[0]).logits), expected, atol=1e-5)
    with pytest.raises(MemoryError, match="no room"):
        queue.result(asks[1])
    assert queue.result(asks[2]).logits.shape[0] == 1
    assert [store.length for store in stores] == [2, 0, 1]


@pytest.mark.parametrize("one_graph", [True, False])
def test_a_pass_that_would_be_one_graph_is_launched_in_pieces(
    monkeypatch: pytest.MonkeyPatch, *, one_graph: bool
) -> None:
    """Unless it begins behind another: then the device has something to do."""
    started: list[int] = []
    monkeypatch.setattr(runner, "launch_in_pieces", lambda keys: started.append(len(keys)))
    model = Model()
    queue, store = PassQueue(ModelRunner(model), 16), model.store()
    queue.runner.one_graph = one_graph
    queue.result(model.submit(queue, store, [5, 9, 3]))
    queue.runner.run(follow(mx.array([1]), [store]))
    assert started == ([len(store.caches)] if one_graph else [])


def test_tokens_chosen_ahead_are_read_without_the_pass_over_them() -> None:
    """From the array that was launched before: a part of it would be computed behind the pass."""
    model = Model()
    batch = follow(mx.array([1]), [model.store()])
    [handle] = ModelRunner(model).run(batch)
    assert isinstance(handle, AheadPass)
    read: Any = handle.read
    assert read.__wrapped__.__self__ is batch.tokens
    assert handle.read() == [1]


def test_what_is_withdrawn_is_not_computed() -> None:
    """A sequence that is closed while it waits leaves the pass, and its KV as it was."""
    model = Model()
    queue = PassQueue(ModelRunner(model), 16)
    stores = [model.store() for _ in range(2)]
    first, second = (model.submit(queue, store, [1, 2]) for store in stores)
    second.cancel()
    queue.result(first)
    assert model.calls == [2]
    assert [store.length for store in stores] == [2, 0]


@pytest.mark.parametrize("family", DRAFTERS)
def test_trees_of_several_sequences_grow_in_turns(family: str) -> None:
    """Trees that grow in turns, depth by depth, are those that grow alone."""
    backend = MlxBackend(tiny_folder(family), 512)
    chains = [[120, 7, 160], [3], [50, 60], [9, 8]]
    fan_outs = [[1, 0, 2], [3], [1, 1], [2, 1]]
    alone = []
    for prompt, chain, fan_out in zip(PROMPTS, chains, fan_outs, strict=True):
        list(backend.open(0, list(prompt), SAMPLINGS["sampled"]))
        alone.append(said(backend.prepare(0, read_tree(chain), fan_out, depth=3)))
        backend.close(0)
    for number, prompt in enumerate(PROMPTS):
        list(backend.open(number, list(prompt), SAMPLINGS["sampled"]))
    work = [
        backend.prepare(number, read_tree(chain), fan_out, depth=3)
        for number, (chain, fan_out) in enumerate(zip(chains, fan_outs, strict=True))
    ]
    grown: list[list[Any]] = [[] for _ in work]
    while any(len(layers) < 3 for layers in grown):
        for layers, steps in zip(grown, work, strict=True):
            if len(layers) < 3 and (layer := next(steps)) is not None:
                layers.append(layer)
    for expected, found in zip(alone, grown, strict=True):
        assert [layer.outcomes for layer in expected] == [layer.outcomes for layer in found]
        assert [layer.tokens for layer in expected] == [layer.tokens for layer in found]
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(one.confidences, other.confidences, atol=1e-4)


class Held:
    """A sequence's state, as far as a pass looks at it."""

    length = 3
    caches: tuple[()] = ()


def test_a_pass_that_does_not_fit_ends_one_sequence() -> None:
    """It is refused before the model is asked, and who waited beside it is served."""
    fed: list[list[int]] = []
    large, small = Held(), Held()

    class Memory:
        def check(self, asked: list[tuple[Held, int]]) -> None:
            if any(state is large for state, _ in asked):
                raise OutOfMemory("a pass needs more memory than there is")

    def model(row: mx.array, cache: object) -> mx.array:
        assert cache == ()
        fed.append(np.array(row[0]).tolist())
        return mx.zeros((1, row.shape[1], 4))

    memory, states = cast(Any, Memory()), cast(Any, (large, small))
    queue = PassQueue(ModelRunner(model, memory=memory), 16)
    refused, served = (queue.submit(BatchPart(state, 2, list, [5, 6])) for state in states)
    with pytest.raises(OutOfMemory):
        queue.result(refused)
    handle = queue.result(served)
    assert (handle.logits.shape, handle.timing.sequences) == ((2, 4), 1)
    assert fed == [[5, 6]]
