"""Buffers that are written to where they are: whose they are, and when the rows are there."""

import mlx.core as mx
import pytest

from services.kernels.cpu.library import view
from services.kv.cache import KVStore
from tests.services.kernels.cuda.host import move_rows
from tests.services.kv.test_cache import labels_of, rows_of


def test_whose_buffers_are_shared_gets_its_own() -> None:
    """A fork and its origin, each the first time; they hold what they held."""
    store = KVStore([None, None], bucketed=True)
    store.chain(5)
    for cache in store.caches:
        cache.update_and_fetch(rows_of([1, 2, 3, 4, 5]), rows_of([1, 2, 3, 4, 5], -1))
    alone = store.caches[0].keys
    store.own()
    assert store.caches[0].keys is alone
    fork = store.fork(3)
    for one in (fork, store):
        before = one.caches[1].keys
        assert before is not None
        held = view(before)
        one.own()
        assert one.caches[1].keys is not before
        own, values = one.caches[1].keys, one.caches[1].values
        assert own is not None
        assert values is not None
        view(own)[..., 1, :] = 9.0
        assert labels_of(mx.array(held[..., :3, :])) == [1, 2, 3]
        assert labels_of(values[..., :3, :]) == [-1, -2, -3]
        settled = one.caches[1].keys
        one.own()
        assert one.caches[1].keys is settled
    assert not store.fork(0).caches[0].state
    store.own()
    assert store.caches[1].keys is settled  # nothing was shared


def test_what_a_pass_wrote_in_place_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the store is asked to, and at the latest with the next pass; not what is given up."""
    launched: list[mx.array] = []
    monkeypatch.setattr("services.kv.cache.launch", launched.append)
    store = KVStore([None, None], bucketed=True)
    passes = [[mx.array(2 * number), mx.array(2 * number + 1)] for number in range(3)]
    for length, written in zip((4, 2, 3), passes, strict=True):
        store.chain(length)
        store.written = written
        assert store.milestones is written
    assert launched == [passes[0][-1], passes[1][-1]]
    store.trim(7)  # a part of the pass stands
    assert store.written is passes[2]
    store.trim(6)
    assert store.written is None
    store.chain(1)
    assert len(launched) == 2


@pytest.mark.parametrize("shared", [False, True])
def test_rows_that_were_written_in_place_are_moved_in_place(
    monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    """At once, before anything else is built; not what others may hold."""
    launched: list[list[mx.array]] = []
    monkeypatch.setattr("services.kv.cache.kv_rows.move", move_rows)
    monkeypatch.setattr("services.kv.cache.launch", launched.append)
    store = KVStore([None, None], bucketed=True)
    store.chain(5)
    for cache in store.caches:
        cache.update_and_fetch(rows_of([1, 2, 3, 4, 5]), rows_of([1, 2, 3, 4, 5], -1))
    store.own()
    mx.eval(store.arrays)
    before = store.caches[0].keys
    fork = store.fork(2) if shared else None
    store.trim(2)
    store.written = [mx.array(0)]
    store.move([3, 4])
    assert store.length == 4
    assert store.caches[0].keys is before
    assert [len(arrays) for arrays in launched] == ([] if shared else [2])
    for cache in store.caches:
        assert cache.keys is not None
        assert labels_of(cache.keys[..., :4, :]) == [1, 2, 4, 5]
    if fork is not None:
        assert fork.caches[0].keys is not None
        assert labels_of(fork.caches[0].keys[..., :3, :]) == [1, 2, 3]
