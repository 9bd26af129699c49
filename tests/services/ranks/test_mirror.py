"""Followers repeat rank 0's passes: whatever happens to its sequences, theirs hold the same KV."""

from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.errors import BackendLost, ProtocolError
from services.engine.packing import enable_packing, pack_caches
from services.kv.cache import KVStore
from services.mlx.loader import windows_of
from services.ranks.messages import Pass
from services.ranks.mirror import MirroredModel, MirroredStore, StoreLog, StoreTwins
from tests.support.reference import Reference, tiny_folder

FAMILIES = ("llama", "sliding")


class Followers:
    """A way to one follower that is in this process, and keeps up at once."""

    def __init__(self, module: Any, windows: list[int | None]) -> None:
        self.twins = StoreTwins(windows, bucketed=False)
        self.heard: list[Pass] = []
        self._module = module

    def announce(self, message: Pass) -> None:
        self.heard.append(message)
        self.twins.repeat(self._module, message)

    def explain(self, error: Exception) -> str:
        return f"explained: {error}"


def rows_of(store: KVStore) -> list[Any]:
    """Keys and values of all layers, as far as there are tokens."""
    return [
        np.array(array[..., : store.length, :]) for layer in store.caches for array in layer.state
    ]


class Rank0:
    """Some sequences of a rank 0, and what may happen to them."""

    def __init__(self, module: Any, random: Random) -> None:
        windows = windows_of(module)
        self.ways, log = Followers(module, windows), StoreLog()
        self.verify = MirroredModel(module, log, self.ways, logits=True)
        self.prefill = MirroredModel(module, log, self.ways, logits=False)
        self._make = lambda: MirroredStore(windows, log, bucketed=False)
        self.stores = [self._make()]
        self._random = random

    def step(self) -> None:
        """Anything."""
        steps = [self.compute, self.compute, self.trim, self.fork, self.open]
        if len(self.stores) > 1:
            steps += [self.compute_together, self.compute_together, self.drop]
        self._random.choice(steps)()

    def compute(self) -> None:
        store, count = self._random.choice(self.stores), self._random.randint(1, 6)
        store.chain(count)
        forward = self._random.choice((self.verify, self.prefill))
        forward(row(self._random, count), cache=store.caches)

    def compute_together(self) -> None:
        chosen = self._random.sample(self.stores, 2)
        for store in chosen:
            store.chain(2)
        self.verify(row(self._random, 4), cache=pack_caches(chosen))

    def trim(self) -> None:
        store = self._random.choice(self.stores)
        store.trim(self._random.randint(0, store.length))

    def fork(self) -> None:
        store = self._random.choice(self.stores)
        forked = store.fork(self._random.randint(0, store.length))
        assert isinstance(forked, MirroredStore)
        self.stores.append(forked)

    def open(self) -> None:
        self.stores.append(self._make())

    def drop(self) -> None:
        self.stores.pop(self._random.randrange(len(self.stores)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_twins_hold_what_rank_0_holds(family: str, seed: int) -> None:
    """Chains alone and together, trims, forks and drops in any order."""
    module, random = new_module(family), Random(seed)  # noqa: S311  # no secret
    enable_packing(module)
    rank0 = Rank0(module, random)
    for _ in range(40):
        rank0.step()
    for store in rank0.stores:  # one more pass tells the follower where each of them stands
        store.chain(1)
        rank0.verify(row(random, 1), cache=store.caches)
        twin = rank0.ways.twins.store(store.number)
        for own, other in zip(rows_of(store), rows_of(twin), strict=True):
            np.testing.assert_array_equal(own, other)
    assert len(rank0.ways.twins) == len(rank0.stores)


def new_module(family: str) -> Any:
    """A tiny model that the test may change."""
    return Reference(tiny_folder(family)).module


def row(random: Random, count: int) -> mx.array:
    return mx.array([[random.randrange(2, 200) for _ in range(count)]])


def test_a_pass_for_the_kv_alone_has_no_logits() -> None:
    """Followers are told that no logits are wanted, and rank 0 has none to use by mistake."""
    module = new_module("llama")
    windows = windows_of(module)
    ways, log = Followers(module, windows), StoreLog()
    store = MirroredStore(windows, log, bucketed=False)
    store.chain(3)
    made = MirroredModel(module, log, ways, logits=False)(mx.array([[5, 6, 7]]), store.caches)
    assert made.shape == (1, 3, 0)
    assert [(message.tokens, message.logits) for message in ways.heard] == [([5, 6, 7], False)]


def test_a_pass_that_fails_after_it_was_announced_ends_the_group() -> None:
    """The ranks may differ from then on, so no request may go on with this group."""
    module = new_module("llama")
    windows = windows_of(module)
    log = StoreLog()

    def fail(tokens: mx.array, cache: Any) -> mx.array:
        del tokens, cache
        raise RuntimeError("connection to a peer was lost")

    store = MirroredStore(windows, log, bucketed=False)
    store.chain(1)
    model = MirroredModel(fail, log, Followers(module, windows), logits=True)
    with pytest.raises(BackendLost, match="explained: connection"):
        model(mx.array([[5]]), store.caches)


def test_a_store_that_has_no_twin_is_refused_before_anything_is_announced() -> None:
    """The other ranks could not follow."""
    module = new_module("llama")
    windows = windows_of(module)
    ways = Followers(module, windows)
    store = KVStore(windows, bucketed=False)
    store.chain(1)
    with pytest.raises(ProtocolError, match="mirrored"):
        MirroredModel(module, StoreLog(), ways, logits=True)(mx.array([[5]]), store.caches)
    assert ways.heard == []


def test_a_follower_that_has_missed_a_pass_says_so() -> None:
    """It holds fewer tokens than rank 0, which must not be computed on."""
    module = new_module("llama")
    windows = windows_of(module)
    ways, log = Followers(module, windows), StoreLog()
    store = MirroredStore(windows, log, bucketed=False)
    store.chain(4)
    store.chain(1)
    with pytest.raises(ProtocolError, match="rank 0 has 4 tokens of store 1, and this rank 0"):
        MirroredModel(module, log, ways, logits=True)(mx.array([[5]]), store.caches)
