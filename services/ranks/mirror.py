"""Forward passes of rank 0 that the followers repeat, each on its own part of the model.

Rank 0 decides; a follower needs to know which tokens of which sequences go through the model next.
Where a sequence was trimmed follows from where its next tokens start. The whole interface is
therefore a pass, plus the forks and drops of stores since the last one.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from protocol.errors import BackendLost, ProtocolError
from services.engine.packing import pack_caches
from services.kv.cache import KVStore
from services.mlx.taps import is_tapped
from services.ranks.messages import Drop, Fork, Pass, SequencePart


class Announcer(Protocol):
    """A channel to the followers."""

    def announce(self, message: Pass) -> None:
        """Announce the pass to all followers; raises BackendLost if one is gone."""
        ...

    def explain(self, error: Exception) -> str:
        """Return why a pass failed on all ranks, as far as that can be determined."""
        ...


class StoreLog:
    """Changes of rank 0's stores that have not been sent to the followers yet."""

    def __init__(self) -> None:
        self._numbers = 0
        self._changes: list[Fork | Drop] = []

    def next_number(self) -> int:
        """Return a number that no store has had."""
        self._numbers += 1
        return self._numbers

    def add(self, change: Fork | Drop) -> None:
        """Append a change; order matters."""
        self._changes.append(change)

    def take(self) -> list[Fork | Drop]:
        """Return all changes since the last call."""
        changes, self._changes = self._changes, []
        return changes


class MirroredStore(KVStore):
    """A store of rank 0 that every follower mirrors."""

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
    """Rank 0's part of a model; a call is announced to the followers, which repeat it.

    Args:
        module: rank 0's part.
        ways: channels to the followers.
        logits: True if callers need logits; without them only the KV is computed.
    """

    def __init__(self, module: Any, log: StoreLog, ways: Announcer, *, logits: bool) -> None:
        self._module = module
        self._log = log
        self._ways = ways
        self._logits = logits

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Map [1, n] tokens to evaluated logits [1, n, vocabulary], or [1, n, 0] without logits.

        Raises:
            BackendLost: a follower was lost, or its part failed; the group must end.
        """
        row: Any = tokens[0].tolist()
        parts = []
        for store in cache[0].stores:
            if not isinstance(store, MirroredStore) or store.span.visible is not None:
                raise ProtocolError("only chains of mirrored stores go through a group of ranks")
            parts.append(SequencePart(store.number, store.span.start, store.span.count))
        # A drafter may read states of the last layer, which the KV alone does not need.
        logits = self._logits or is_tapped(self._module)
        message = Pass(changes=self._log.take(), parts=parts, tokens=row, logits=logits)
        self._ways.announce(message)
        try:
            return run_pass(self._module, tokens, cache, logits=logits)
        # After any error the ranks may differ.
        except Exception as error:
            raise BackendLost(self._ways.explain(error)) from error


def run_pass(module: Any, tokens: mx.array, cache: Sequence[Any], *, logits: bool) -> mx.array:
    """Run and evaluate one rank's forward pass.

    All ranks must request the same arrays in the same order: collectives match by order.
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
        """Run rank 0's pass on this rank's part of the model."""
        self._apply(message.changes)
        caches = self._caches(message.parts)
        run_pass(module, mx.array(message.tokens)[None], caches, logits=message.logits)

    def _apply(self, changes: Sequence[Fork | Drop]) -> None:
        """Apply rank 0's changes; a store without a pass so far has no twin."""
        for change in changes:
            match change:
                case Fork(number=number, parent=parent, length=length):
                    self._stores[number] = self.store(parent).fork(length)
                case Drop(number=number):
                    self._stores.pop(number, None)

    def _caches(self, parts: Sequence[SequencePart]) -> Sequence[Any]:
        """Return the caches for a pass over these parts, with room for them."""
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
        """Return the twin of this store; an empty one for a number without a pass so far."""
        if number not in self._stores:
            self._stores[number] = KVStore(self._windows, bucketed=self._bucketed)
        return self._stores[number]
