"""How prompts are cut, and that nobody waits for a whole one."""

from itertools import islice
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from protocol.messages import (
    FromService,
    OpenSequence,
    Prefilled,
    Sampling,
    VerificationOutcome,
    Verify,
)
from services.engine import chunked_prefill
from services.engine.chunked_prefill import ChunkSizer
from services.kernels.register import KERNELS
from services.kv.cache import KVStore
from services.mlx import launching
from services.runtime.inbox import Work
from services.runtime.work_queue import WorkQueue
from services.verifier.verifier import Verifier
from tests.support.reference import plain, tiny_verifier


def test_alone_a_prompt_goes_in_the_largest_pieces() -> None:
    """Nobody waits, so nobody is stalled."""
    sizer = ChunkSizer(512)
    sizer.observe(100, 1.0)
    assert sizer.size(alone=True) == 512


@pytest.mark.parametrize(
    ("left", "chunks"),
    [(300, [300]), (1300, [1024, 276]), (7383, [2048, 2048, 2048, 1024, 215]), (2048, [2048])],
)
def test_alone_on_cuda_few_large_pieces_recur(
    monkeypatch: pytest.MonkeyPatch, left: int, chunks: list[int]
) -> None:
    """What is left over is as short as elsewhere."""
    monkeypatch.setattr(chunked_prefill, "kernels", lambda: KERNELS["cuda"])
    sizer, found = ChunkSizer(512), list[int]()
    while left:
        found.append(min(left, sizer.size(alone=True, left=left)))
        left -= found[-1]
    assert found == chunks
    assert sizer.size(alone=False) == 32


@pytest.mark.parametrize(
    ("tokens", "seconds", "expected"),
    [(0, 0.0, 32), (100, 1.0, 25), (100, 10.0, 16), (10_000, 1.0, 512), (64, 0.0, 32)],
)
def test_in_company_a_piece_takes_a_quarter_of_a_second(
    tokens: int, seconds: float, expected: int
) -> None:
    """As measured with the last piece; never none, never more than was set; at first a guess."""
    sizer = ChunkSizer(512)
    sizer.observe(tokens, seconds)
    assert sizer.size(alone=False) == expected
    assert ChunkSizer(8).size(alone=False) == 8


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_a_prompt_may_be_computed_a_few_layers_at_a_time(
    monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """Begun with what comes next while the host builds that; its states are the same."""
    events: list[tuple[str, int]] = []

    def record(name: str) -> None:
        own: Any = getattr(mx, name)

        def recorded(arrays: Any) -> None:
            events.append((name, len(arrays)))
            own(arrays)

        monkeypatch.setattr(launching.mx, name, recorded)

    tokens, states = tuple(range(5, 45)), list[KVStore]()
    for in_pieces in (False, True):
        verifier = tiny_verifier("llama")
        verifier._chunked_prefill.runner.one_graph = in_pieces
        if in_pieces:
            monkeypatch.setattr(launching, "_FEW_LAYERS", layers)
            record("async_eval")
            record("eval")
        list(verifier.handle(opening(1, tokens)))
        state = verifier._sequences[1].state
        assert isinstance(state, KVStore)
        states.append(state)
    begun = [count for name, count in events if name == "async_eval"]
    whole = len(states[0].caches)
    assert begun == [min(layers, whole - at) for at in range(0, whole, layers)]
    first = events.index(("async_eval", begun[0]))
    in_turn = [("eval", count) for count in [0, *begun[:-1]]]
    assert events[first : first + 2 * len(begun)][1::2] == in_turn
    for own, other in zip(states[0].arrays, states[1].arrays, strict=True):
        assert mx.array_equal(own[:, :, : len(tokens)], other[:, :, : len(tokens)])


def opening(number: int, tokens: tuple[int, ...]) -> OpenSequence:
    return OpenSequence(sequence=number, tokens=list(tokens), sampling=Sampling())


def by_turns(verifier: Verifier, messages: list[OpenSequence]) -> tuple[list[int], list[Prefilled]]:
    """All messages wait at once: the rows of each pass that follows, and the answers."""
    rows: list[int] = []
    inner: Any = verifier._model

    def counted(tokens: Any, cache: Any) -> Any:
        rows.append(tokens.shape[1])
        return inner(tokens, cache=cache)

    verifier._chunked_prefill.runner.model = counted
    queue, answers = WorkQueue(verifier), list[Prefilled]()
    for message in messages:
        queue.add(message)
    while queue:
        _, said = step(queue, verifier)
        answers += [answer for answer in said if isinstance(answer, Prefilled)]
    return rows, answers


def step(queue: WorkQueue, verifier: Verifier) -> tuple[Work, list[FromService | None]]:
    """One turn: whose it was, and what was said; nothing at the end of a message's work."""
    job = queue.next()
    job.answers = job.answers or verifier.handle(job.message)
    queue.rotate(job)
    try:
        return job.message, [next(job.answers)]
    except StopIteration:
        queue.finish(job)
        return job.message, []


def test_prompts_that_wait_share_a_pass() -> None:
    """Short prompts of several requests are one pass, and each is then decoded as if alone."""
    prompts = [(11, 200, 7), (5, 9, 2, 8, 1), (64, 5, 120, 31)]
    verifier = tiny_verifier("llama")
    rows, answers = by_turns(verifier, [opening(n, p[:-1]) for n, p in enumerate(prompts)])
    assert rows == [2 + 4 + 3]
    assert [(one.sequence, one.length) for one in answers] == [(0, 2), (1, 4), (2, 3)]
    for number, prompt in enumerate(prompts):
        asked = Verify(sequence=number, round=1, position=len(prompt) - 1, nodes=[prompt[-1]])
        outcome = list(verifier.handle(asked))[-1]
        assert isinstance(outcome, VerificationOutcome)
        assert [outcome.bonus] == plain("llama", prompt, 1, Sampling())


def test_a_pass_of_prompts_has_its_limit() -> None:
    """No more tokens than a piece may have go together; the rest come next."""
    verifier = tiny_verifier("llama", 8)
    rows, _ = by_turns(verifier, [opening(n, (n + 1,) * 5) for n in range(3)])
    assert rows == [5, 5, 5]
    rows, _ = by_turns(verifier, [opening(n, (n + 100,) * 4) for n in range(3, 6)])
    assert rows == [8, 4]


def test_chunks_are_as_long_as_memory_allows() -> None:
    """Where a whole prompt's arrays do not fit at once, it goes in pieces that do."""

    class Memory:
        def fit(self, state: object, rows: int, least: int) -> int:
            del state
            assert least <= rows
            return min(rows, 16)

        def check(self, passes: list[tuple[object, int]]) -> None:
            assert sum(rows for _, rows in passes) <= 16

    verifier = tiny_verifier("llama")
    prefill: Any = verifier._chunked_prefill
    prefill.runner.memory = Memory()
    rows, answers = by_turns(verifier, [opening(1, tuple(range(20, 100)))])
    assert rows == [16] * 5
    assert [answer.length for answer in answers] == [80]


def test_a_prompt_does_not_wait_for_what_another_device_computes() -> None:
    """A shorter prompt is in work elsewhere: the longer one is computed here meanwhile."""
    verifier = tiny_verifier("llama", 8)
    prefill, tokens = verifier._chunked_prefill, list(range(1, 21))
    sequence: Any = SimpleNamespace(tokens=list[int](), state=verifier.new_state())
    with prefill.register(1, [200] * 10), prefill.register(2, tokens):
        pieces = prefill.fill(2, sequence, tokens, lambda: True)
        assert len(list(islice(pieces, 20))) < 20
    assert sequence.tokens == tokens


def test_a_prompt_waits_for_the_same_prompt() -> None:
    """What another request's prompt will hold in a moment is not computed twice."""
    prompt = tuple(range(2, 42))
    verifier = tiny_verifier("llama")
    asked = [opening(1, prompt), opening(2, (*prompt, 7, 8)), opening(3, (9, 9, 9))]
    rows, answers = by_turns(verifier, asked)
    assert rows == [43, 2]
    assert {one.sequence: one.cached for one in answers} == {1: 0, 2: 40, 3: 0}


def test_nobody_waits_for_a_prompt_that_is_given_up() -> None:
    """The one that waited computes it itself."""
    prompt = tuple(range(2, 42))
    verifier = tiny_verifier("llama")
    first, second = (verifier.handle(opening(number, prompt)) for number in (1, 2))
    assert [next(first), next(second), next(second)] == [None, None, None]
    first.close()
    *_, answer = second
    assert isinstance(answer, Prefilled)
    assert (answer.length, answer.cached) == (40, 0)


def test_a_long_prompt_does_not_stall_the_others() -> None:
    """Between any two pieces of a new request's prompt a verification of another is answered."""
    verifier = tiny_verifier("llama")
    queue = WorkQueue(verifier)
    answers: list[FromService | None] = []
    prompt = (11, 200, 7)
    queue.add(OpenSequence(sequence=1, tokens=list(prompt[:-1]), sampling=Sampling()))
    while queue:
        step(queue, verifier)
    long = OpenSequence(sequence=2, tokens=[5] * 200, sampling=Sampling())
    queue.add(long)
    committed = list(prompt)
    while not any(isinstance(answer, Prefilled) for answer in answers):
        if not any(line == 1 for line in queue._lines):
            queue.add(
                Verify(sequence=1, round=1, position=len(committed) - 1, nodes=[committed[-1]])
            )
        message, said = step(queue, verifier)
        for answer in said:
            if isinstance(message, OpenSequence) or answer is not None:
                answers.append(answer)
            if isinstance(answer, VerificationOutcome):
                committed.append(answer.bonus)
    kinds = "".join("v" if isinstance(answer, VerificationOutcome) else "p" for answer in answers)
    assert kinds.count("p") >= 2
    assert "ppp" not in kinds
    assert kinds.count("v") >= kinds.count("p") - 2
    assert committed[3:] == plain("llama", prompt, len(committed) - 3, Sampling())


def test_a_long_chunk_lets_a_sign_of_life_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter's chunk is expected to take two seconds at most, however slow the machine."""
    monkeypatch.setattr(chunked_prefill, "kernels", lambda: KERNELS["cpu"])
    for tokens_per_s, size in ((5, 16), (60, 112), (1000, 512)):
        sizer = ChunkSizer(512, short=True)
        assert sizer.size(alone=True, left=4096) == 512  # nothing is measured yet
        sizer.observe(512, 512 / tokens_per_s)
        assert sizer.size(alone=True, left=4096) == size, tokens_per_s


def test_a_targets_chunks_do_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody waits they have one size, and what they take is known from the last."""
    monkeypatch.setattr(chunked_prefill, "kernels", lambda: KERNELS["cpu"])
    sizer = ChunkSizer(512)
    assert sizer.expected_s == 0.0
    sizer.observe(32, 1.0)
    assert sizer.size(alone=True, left=4096) == 512
    assert sizer.expected_s == 16.0
