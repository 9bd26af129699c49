"""Forward passes of rank 0 that the followers repeat, each on its own part of the model.

Rank 0 decides; a follower needs to know which tokens of which sequences go through the model
next. Where a sequence was trimmed follows from where its next tokens start. So the whole
interface is a pass, plus the forks and drops of stores since the last one.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from protocol.errors import BackendLost, ProtocolError
from services.batching.packing import pack_caches
from services.kv.cache import KVStore
from services.mlx.taps import is_tapped
from services.ranks.messages import Drop, Fork, Pass, SequencePart


class Announcer(Protocol):
    """The way to the followers."""

    def announce(self, message: Pass) -> None:
        """Tell all followers; raises BackendLost if one is gone."""
        ...

    def explain(self, error: Exception) -> str:
        """Why a pass failed on all ranks, as far as it can be found out."""
        ...


class StoreLog:
    """Changes of rank 0's stores that the followers have not been sent yet."""

    def __init__(self) -> None:
        self._numbers = 0
        self._changes: list[Fork | Drop] = []

    def next_number(self) -> int:
        """A number that no store has had."""
        self._numbers += 1
        return self._numbers

    def add(self, change: Fork | Drop) -> None:
        """Note a change; its place among the others is kept."""
        self._changes.append(change)

    def take(self) -> list[Fork | Drop]:
        """All changes since the last call."""
        changes, self._changes = self._changes, []
        return changes


class MirroredStore(KVStore):
    """A store of rank 0, which has a twin on every follower."""

    def __init__(self, windows: Sequence[int | None], log: StoreLog, *, bucketed: bool) -> None:
        super().__init__(windows, bucketed=bucketed)
        self._log = log
        self.number = log.next_number()
        weakref.finalize(self, log.add, Drop(self.number)).atexit = False

    def _empty(self, fork_length: int) -> "MirroredStore":
        windows = [cache.window for cache in self.caches]
        new = MirroredStore(windows, self._log, bucketed=self._bucketed)
        self._log.add(Fork(new.number, self.number, fork_length))
        return new


class MirroredModel:
    """Rank 0's part of a model; a call is announced to the followers, which do the same.

    Args:
        module: rank 0's part.
        ways: to the followers.
        logits: whether callers want logits; without them only the KV is computed.
    """

    def __init__(self, module: Any, log: StoreLog, ways: Announcer, *, logits: bool) -> None:
        self._module = module
        self._log = log
        self._ways = ways
        self._logits = logits

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """[1, n] tokens -> [1, n, vocabulary] logits, or [1, n, 0] without; all computed.

        Raises:
            BackendLost: a follower was lost, or its part failed; the group must end.
        """
        row: Any = tokens[0].tolist()
        parts = []
        for store in cache[0].stores:
            if not isinstance(store, MirroredStore) or store.frame.visible is not None:
                raise ProtocolError("only chains of mirrored stores go through a group of ranks")
            parts.append(SequencePart(store.number, store.frame.start, store.frame.count))
        # States that a drafter reads may be those of the last layer, which the KV do not need.
        logits = self._logits or is_tapped(self._module)
        message = Pass(changes=self._log.take(), parts=parts, tokens=row, logits=logits)
        self._ways.announce(message)
        try:
            return run_pass(self._module, tokens, cache, logits=logits)
        # Whatever it is: from here on the ranks may differ.
        except Exception as error:
            raise BackendLost(self._ways.explain(error)) from error


def run_pass(module: Any, tokens: mx.array, cache: Sequence[Any], *, logits: bool) -> mx.array:
    """One rank's forward pass, completely computed.

    All ranks must ask MLX for the same arrays in the same order: collectives meet by order.
    """
    made: mx.array = module(tokens, cache=cache)
    states = [store.caches for store in cache[0].stores]
    mx.eval([made] if logits else [], [layer.state for layers in states for layer in layers])
    return made if logits else mx.zeros((1, tokens.shape[1], 0))


class StoreTwins:
    """A follower's stores, by rank 0's numbers."""

    def __init__(self, windows: Sequence[int | None], *, bucketed: bool) -> None:
        self._windows = windows
        self._bucketed = bucketed
        self._stores: dict[int, KVStore] = {}

    def __len__(self) -> int:
        return len(self._stores)

    def repeat(self, module: Any, message: Pass) -> None:
        """Do rank 0's pass on this rank's part of the model."""
        self._apply(message.changes)
        caches = self._caches(message.parts)
        run_pass(module, mx.array(message.tokens)[None], caches, logits=message.logits)

    def _apply(self, changes: Sequence[Fork | Drop]) -> None:
        """Do what rank 0 did to its stores; one that had no pass yet has no twin."""
        for change in changes:
            match change:
                case Fork(number=number, parent=parent, length=length):
                    self._stores[number] = self.store(parent).fork(length)
                case Drop(number=number):
                    self._stores.pop(number, None)

    def _caches(self, parts: Sequence[SequencePart]) -> Sequence[Any]:
        """The caches for a pass over these parts, with room for them."""
        stores = []
        for part in parts:
            store = self.store(part.number)
            if part.start > store.length:
                raise ProtocolError(
                    f"rank 0 has {part.start} tokens of store {part.number}, "
                    f"and this rank {store.length}"
                )
            store.trim(part.start)
            store.chain(part.count)
            stores.append(store)
        return stores[0].caches if len(stores) == 1 else pack_caches(stores)

    def store(self, number: int) -> KVStore:
        """The twin of this store; an empty one for a number that had no pass yet."""
        if number not in self._stores:
            self._stores[number] = KVStore(self._windows, bucketed=self._bucketed)
        return self._stores[number]
