"""The KV of earlier sequences: the same tokens as without it, bounds, and who may share what."""

from functools import cache
from itertools import count

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.token_tree import read_tree
from protocol.messages import (
    CloseSequence,
    OpenSequence,
    Prefilled,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.drafter.backends.mlx import MlxBackend
from services.engine import chunked_prefill
from services.kv.cache import KVStore
from services.kv.prefix_cache import CachedPrefix, PrefixCache
from services.mlx.loader import LoadedModel, load, windows_of
from services.verifier.verifier import Verifier
from tests.support.reference import SAMPLINGS, drafts, plain, said, tiny_folder, tiny_verifier
from tests.support.tiny_models import DRAFTERS, SLOTTED

TEXT = (0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64, 5, 120, 31, 88, 160, 3)
MUCH = 2**40
NUMBERS = count(1)


@cache
def model_of(family: str) -> LoadedModel:
    return load(tiny_folder(family))


def verifier_of(family: str, most: int = 10, most_bytes: int = MUCH) -> Verifier:
    return tiny_verifier(family, 512, PrefixCache(most, most_bytes))


class Turn:
    """One request: its prompt is opened, and answered with drafts that are partly wrong."""

    def __init__(self, verifier: Verifier, prompt: Tokens, sampling: Sampling) -> None:
        self.verifier, self.number, self.tokens = verifier, next(NUMBERS), list(prompt)
        opening = OpenSequence(sequence=self.number, tokens=prompt[:-1], sampling=sampling)
        [opened] = said(verifier.handle(opening))
        assert isinstance(opened, Prefilled)
        assert opened.length == len(prompt) - 1
        self.cached = opened.cached

    def answer(self, expected: Tokens) -> None:
        """Every token is the expected one."""
        rest = list(expected)
        while rest:
            draft = [*rest[:2], (rest[0] + 1) % 288]
            asked = Verify(
                sequence=self.number,
                round=1,
                position=len(self.tokens) - 1,
                nodes=[self.tokens[-1], *draft],
            )
            [outcome] = said(self.verifier.handle(asked))
            assert isinstance(outcome, VerificationOutcome)
            news = [*draft[: outcome.accepted], outcome.bonus]
            count_ = min(len(news), len(rest))
            assert news[:count_] == rest[:count_]
            self.tokens += news
            rest = rest[count_:]

    def close(self) -> None:
        list(self.verifier.handle(CloseSequence(sequence=self.number)))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", SLOTTED)
def test_a_second_turn_computes_its_new_tokens_only(family: str, sampling: Sampling) -> None:
    """A prompt that goes on where an answer ended takes that answer's KV, and changes no token."""
    verifier = verifier_of(family)
    first = Turn(verifier, list(TEXT), sampling)
    assert first.cached == 0
    first.answer(plain(family, TEXT, 9, sampling))
    first.close()
    held = len(first.tokens) - 1  # the last one is pending
    prompt = (*first.tokens, 50, 60, 70)
    second = Turn(verifier, list(prompt), sampling)
    assert second.cached == held
    second.answer(plain(family, prompt, 9, sampling))


@pytest.mark.parametrize("family", ["llama", "sliding", "gemma3"])
def test_requests_that_run_at_the_same_time_share_a_beginning(family: str) -> None:
    """One begins with the KV of another that goes on: neither sees what the other does."""
    verifier = verifier_of(family)
    first = Turn(verifier, list(TEXT), Sampling())
    answer = plain(family, TEXT, 12, Sampling())
    first.answer(answer[:3])
    prompts = [(*TEXT[:10], 99, 98), TEXT, (*TEXT, *answer[:2], 7)]
    others = [Turn(verifier, list(prompt), Sampling()) for prompt in prompts]
    assert [other.cached for other in others] == [10, len(TEXT) - 1, len(TEXT) + 2]
    for prompt, other in zip(prompts, others, strict=True):
        other.answer(plain(family, prompt, 6, Sampling()))
    rest = answer[len(first.tokens) - len(TEXT) :]
    first.answer(rest)


def test_an_abandoned_prefill_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is cancelled in the middle of a prompt and asks again goes on there."""
    monkeypatch.setattr(chunked_prefill, "_STEPS_ALONE", 1)  # on CUDA, too
    verifier = tiny_verifier("llama", 3, PrefixCache(10, MUCH))
    opening = verifier.handle(OpenSequence(sequence=1, tokens=list(TEXT), sampling=Sampling()))
    # Two pieces: each is asked for, so that others may join in, and then computed.
    assert [next(opening) for _ in range(4)] == [None] * 4
    opening.close()
    turn = Turn(verifier, list(TEXT), Sampling())
    assert turn.cached == 6
    turn.answer(plain("llama", TEXT, 6, Sampling()))


@pytest.mark.parametrize("family", DRAFTERS)
def test_a_drafter_reuses_its_own_kv(family: str) -> None:
    """Drafts after a reused beginning are a fresh drafter's, whatever tree was behind it."""
    kept = MlxBackend(tiny_folder(family), 512, "", PrefixCache(10, MUCH))
    fresh = MlxBackend(tiny_folder(family), 512)
    list(kept.open(1, list(TEXT), Sampling()))
    list(kept.prepare(1, read_tree([9, 8, 7]), [1, 2, 1], 3))
    kept.close(1)
    prompt = [*TEXT, 9, 8, 5, 4]
    found = []
    for backend in (kept, fresh):
        list(backend.open(2, prompt, Sampling()))
        found.append([one.token for one in drafts(backend.draft(2, 120, 5))])
    assert found[0] == found[1]


# ---------------------------------------------------------------- the store


def store_of(tokens: Tokens) -> KVStore:
    """A KV whose keys and values tell its tokens."""
    store = KVStore([None, 4], bucketed=False)
    fill(store, tokens)
    return store


def fill(store: KVStore, tokens: Tokens) -> None:
    store.chain(len(tokens))
    rows = mx.broadcast_to(
        mx.array(tokens, dtype=mx.float32)[None, None, :, None], (1, 2, len(tokens), 4)
    )
    for cache_ in store.caches:
        cache_.update_and_fetch(rows, -rows)


def tokens_in(store: KVStore) -> list[Tokens]:
    found: list[Tokens] = []
    for cache_ in store.caches:
        for array, sign in ((cache_.keys, 1), (cache_.values, -1)):
            assert array is not None
            rows = sign * np.array(array)[0, :, : store.length, :]
            assert (rows == rows[:1, :, :1]).all()
            found.append([int(row) for row in rows[0, :, 0]])
    return found


steps = st.lists(
    st.tuples(st.sampled_from(["append", "trim", "fork"]), st.integers(0, 5), st.integers(0, 400)),
    max_size=14,
)


@given(steps)
def test_forks_never_see_each_other(wanted: list[tuple[str, int, int]]) -> None:
    """However stores fork, grow and shrink, each holds its own tokens."""
    fresh = count(1000)
    stores = [(store_of([1, 2, 3]), [1, 2, 3])]
    for kind, which, size in wanted:
        store, tokens = stores[which % len(stores)]
        match kind:
            case "append":
                news = [next(fresh) for _ in range(size + 1)]
                fill(store, news)
                tokens += news
            case "trim":
                length = size % (len(tokens) + 1)
                store.trim(length)
                del tokens[length:]
            case _:
                length = size % (len(tokens) + 1)
                stores.append((store.fork(length), tokens[:length]))
    for store, tokens in stores:
        if tokens:
            assert tokens_in(store) == [tokens] * 4


def test_a_fork_beyond_the_end_is_an_error() -> None:
    """There is nothing to share behind the last token."""
    with pytest.raises(ValueError, match="cannot fork 4 of 3 tokens"):
        store_of([1, 2, 3]).fork(4)


# ---------------------------------------------------------------- what is kept


def held(*tokens: int) -> CachedPrefix:
    return CachedPrefix(list(tokens), store_of(list(tokens)))


def test_the_longest_beginning_wins() -> None:
    """Of all that is kept and running, the KV with the longest common beginning is taken."""
    prompts = PrefixCache(10, MUCH)
    prompts.keep(held(1, 2, 3))
    prompts.keep(held(1, 2, 4, 5))
    prompts.keep(held(7, 8))
    store = prompts.fork([1, 2, 4, 5, 6])
    assert store is not None
    assert tokens_in(store)[0] == [1, 2, 4, 5]
    store = prompts.fork([1, 2, 3, 9, 9], [held(1, 2, 3, 9)])
    assert store is not None
    assert tokens_in(store)[0] == [1, 2, 3, 9]
    assert prompts.fork([2, 3]) is None
    assert prompts.fork([]) is None


def test_only_what_the_kv_holds_counts() -> None:
    """Tokens that the KV does not hold any more are not offered."""
    store = store_of([1, 2, 3, 4])
    store.trim(2)
    prompts = PrefixCache(10, MUCH)
    prompts.keep(CachedPrefix([1, 2, 3, 4], store))
    found = prompts.fork([1, 2, 3, 4])
    assert found is not None
    assert found.length == 2


def test_a_longer_one_replaces_its_own_beginning() -> None:
    """Each turn of a chat leaves one entry, not one per turn; a shorter twin is not kept twice."""
    prompts = PrefixCache(10, MUCH)
    for turn in (held(1, 2), held(1, 2, 3, 4), held(1, 2, 3, 4, 5), held(1, 2, 3, 4, 5)):
        prompts.keep(turn)
    assert len(prompts) == 1
    prompts.keep(held(1, 2, 9))
    assert len(prompts) == 2


def test_the_number_is_bounded() -> None:
    """Beyond it the least recently used goes first; none at all is kept if so wished."""
    prompts = PrefixCache(2, MUCH)
    prompts.keep(held(1, 1))
    prompts.keep(held(2, 2))
    prompts.fork([1, 1])
    prompts.keep(held(3, 3))
    assert [prompts.fork([token, token]) is not None for token in (1, 2, 3)] == [True, False, True]
    nothing = PrefixCache()
    nothing.keep(held(1, 1))
    assert nothing.fork([1, 1]) is None


def test_the_bytes_are_bounded() -> None:
    """So is the memory: what is too large alone is not kept either."""
    one = held(1, 1).state.nbytes
    prompts = PrefixCache(10, 2 * one)
    for token in (1, 2, 3):
        prompts.keep(held(token, token))
        assert prompts.nbytes <= 2 * one
    assert [prompts.fork([token]) is not None for token in (1, 2, 3)] == [False, True, True]
    tight = PrefixCache(10, one - 1)
    tight.keep(held(1, 1))
    assert len(tight) == 0


def test_kv_is_counted_in_tokens() -> None:
    """So many tokens fit into so many bytes; a model that keeps no KV has no bound."""
    module = model_of("llama").module
    store = KVStore(windows_of(module), bucketed=False)
    store.chain(256)
    module(mx.array([[1] * 256]), cache=store.caches)
    verifier = verifier_of("llama")
    assert verifier.kv_tokens(store.nbytes).tokens == 256
    assert verifier.kv_tokens(10 * store.nbytes).tokens == 2560
    assert verifier.kv_tokens(0).tokens > 2560
    assert verifier_of("mamba").kv_tokens(10**6).tokens == 0
