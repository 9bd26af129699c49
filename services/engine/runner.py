"""Passes of one model, computed in whichever way is fastest: the same to those who ask for them.

A `Batch` goes over the slot table, as one packed row of several sequences, through a trace, or
through the model itself.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from protocol.messages import Tokens
from services.engine.batch import Batch, BatchArrays, BatchPart
from services.engine.packing import pack_pass
from services.engine.pass_handle import (
    AheadPass,
    JointChoice,
    PassHandle,
    PassTiming,
    ReservedPass,
)
from services.engine.pass_memory import PassMemory
from services.engine.slot_table import SlotTable
from services.engine.traced_forward import TracedForward
from services.kernels.cuda.doorbell import Doorbell
from services.kernels.cuda.host_rows import ReadRows, pending
from services.kernels.register import kernels
from services.kv.branching import BranchingState
from services.kv.cache import KVStore
from services.kv.layered import LayeredState
from services.kv.state import SequenceState
from services.mlx.launching import compute_in_pieces, launch, launch_in_pieces


class _Result(NamedTuple):
    """The results of a whole pass, lazy."""

    logits: mx.array
    """[1, rows, vocabulary]"""
    written: list[mx.array] | None = None
    """As for `ReservedPass`, of a pass whose place is on the device."""


class ModelRunner:
    """Runs the passes of a model.

    Args:
        model: called on tokens [1, n] and caches.
        traced: runs the passes of one sequence that it serves.
        read: returns the states read in the last pass, None if there are none.
        memory: refuses passes that do not fit.
    """

    def __init__(
        self,
        model: Any,
        traced: TracedForward | None = None,
        read: Callable[[], ReadRows | None] | None = None,
        memory: PassMemory | None = None,
    ) -> None:
        self.model, self.traced = model, traced
        self.read, self.memory = read, memory
        self.table: SlotTable | None = None
        """Slot table of sequences that share passes, where one attention kernel serves all of
        them.
        """
        self.fills = False
        """True if the passes are over prompts, which a table also takes alone, if they suit it."""
        self.one_graph = False
        """True if MLX builds one graph of everything submitted at once, so that passes go in
        pieces.
        """

    def run(self, batch: Batch) -> list[PassHandle]:
        """Start a pass; return a handle for each of its sequences, in order.

        The states hold its rows afterwards, unless it begins ahead.

        Raises any error of the model for these tokens; the states are then as before.
        """
        before = [(part.state, part.state.length) for part in batch.parts]
        try:
            if self.memory is not None:
                self.memory.check([(part.state, part.count) for part in batch.parts])
            handles = self._run(batch)
        except BaseException:
            if self.table is not None and not batch.ahead:
                self.table.give_up_pass()
            _restore(before)
            raise
        if batch.ahead:
            _restore(before)
            launch(handles[0].logits if handles[0].joint is None else handles[0].joint.lazy)
        return handles

    def reserve(self, rows: int, store: KVStore, bell: Doorbell) -> ReservedPass | None:
        """Start a pass over up to `rows` rows that waits for its tokens, once it is launched.

        Args:
            rows: a size of trees.
            store: of the sequence, with the current chain or tree, whose outcome need not be known.
                It holds the buffers that the pass writes to.
            bell: the doorbell on which the device waits.

        Returns:
            None if there is no trace of such a shape, or the buffers have to grow first.
        """
        slots = 0 if self.traced is None else self.traced.find_slots(rows, store)
        if not slots:
            return None
        arrays, ticket = bell.await_tokens(rows, slots, store.length)
        tokens, *place = arrays.arrays
        batch = Batch([BatchPart(store, rows, list)], place=place)
        result, features = self._build(batch, tokens, {})
        return ReservedPass(
            state=store,
            logits=result.logits[0],
            features=features,
            bell=bell,
            ticket=ticket,
            slots=slots,
            written=result.written,
        )

    def _run(self, batch: Batch) -> list[PassHandle]:
        parts = batch.parts
        row, rows, extra = _begin(batch)
        timing = PassTiming(row.shape[1], len(parts))
        result, features = self._build(batch, row, extra)
        logits = result.logits[0]
        joint = JointChoice(logits) if len(parts) > 1 else None
        # The array that has been launched: a part of it would be computed behind this pass.
        read: Any = cache(batch.tokens.tolist) if batch.ahead and batch.tokens is not None else None
        handles = list[PassHandle]()
        for part, own in zip(parts, rows, strict=True):
            about = {
                "state": part.state,
                "timing": timing,
                "row": own.start,
                "logits": logits[own],
                "features": None if features is None else features[own],
                "joint": joint,
            }
            if batch.ahead:
                resume = partial(part.state.resume, part.state.suspend())
                handles.append(AheadPass(**about, read=read, resume=resume))
            else:
                handles.append(PassHandle(**about))
        return handles

    def _build(
        self, batch: Batch, row: mx.array, extra: dict[str, mx.array]
    ) -> tuple[_Result, ReadRows | None]:
        """Return the lazy results of a pass over this [1, rows] row, with its features.

        Evaluating the logits evaluates the features as well: they are submitted first.
        """
        result = self._call(batch, row, extra)
        state = batch.parts[0].state
        is_awaited = not batch.ahead and not batch.place
        if self.one_graph and is_awaited and isinstance(state, KVStore | LayeredState):
            split = compute_in_pieces if self.fills else launch_in_pieces
            split(state.milestones)
        features = self.read() if self.read is not None else None
        if features is not None:
            result = result._replace(logits=mx.depends(result.logits, pending(features)))
        return result, features

    def _call(self, batch: Batch, row: mx.array, extra: dict[str, mx.array]) -> _Result:
        state, table = batch.parts[0].state, self.table
        if isinstance(state, BranchingState) and state.is_batched:
            logits = self.model(row.swapaxes(0, 1), cache=state.caches)
            return _Result(logits.swapaxes(0, 1))
        if table is not None and not batch.place:
            seated = self._run_at(table, row, batch, extra)
            if seated is not None:
                return _Result(seated)
        if len(batch.parts) > 1:
            with pack_pass(batch.states, in_batches=kernels().batches_recurrences) as caches:
                return _Result(self.model(row, cache=caches, **extra))
        traced = self.traced
        if traced is not None and isinstance(state, KVStore):
            if batch.place:
                replayed = traced.replay(BatchArrays(row, *batch.place), state)
                return _Result(replayed.logits, replayed.written or None)
            if traced.serves(state, ahead=batch.ahead):
                return _Result(traced(row, state, ahead=batch.ahead))
        logits = self.model(row, cache=state.caches, **extra)
        if table is not None:
            table.drop_if_empty()
        return _Result(logits)

    def _run_at(
        self,
        table: SlotTable,
        row: mx.array,
        batch: Batch,
        extra: dict[str, mx.array],
    ) -> mx.array | None:
        """Return the logits, if the table supports such a pass."""
        stores = [state for state in batch.states if isinstance(state, KVStore)]
        if extra or len(stores) < len(batch.parts):
            return None
        if self.fills:
            suits = table.suits_prompts(stores)
        else:
            suits = len(stores) > 1 or table.is_shared_by(stores[0])
        logits = table.run(self.model, row, stores) if suits else None
        if logits is None:
            for store in stores:
                store.gather()
        return logits


def _begin(batch: Batch) -> tuple[mx.array, list[slice], dict[str, mx.array]]:
    """Begin the pass on all states.

    Returns:
        Its tokens, [1, rows]; the rows of each sequence's new ones; other inputs of the model.
    """
    row: Tokens = []
    rows = list[slice]()
    inputs = []
    each = 0 if batch.tokens is None else batch.tokens.size // len(batch.parts)
    for part in batch.parts:
        owed = part.begin() or []
        start = len(row) + len(owed) if not each else len(rows) * each
        rows.append(slice(start, start + (each or len(part.tokens))))
        row += [*owed, *part.tokens]
        if part.inputs is not None:
            inputs.append(part.inputs())
    tokens = mx.array(row) if batch.tokens is None else batch.tokens
    extra = {"states": mx.concatenate(inputs, axis=1)} if inputs else {}
    return tokens[None], rows, extra


def _restore(before: Sequence[tuple[SequenceState, int]]) -> None:
    """Cut states to their lengths before a pass."""
    for state, length in before:
        if state.length > length:
            state.commit(length)
