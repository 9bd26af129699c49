"""Passes of one model, computed in whichever way is fastest: the same to those who ask for them.

A pass goes over the slot table, as one packed row of several sequences, through a trace, or through
the model itself. What it is over is said by the spans of its states.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx

from protocol.messages import Tokens
from services.engine.batch import Span
from services.engine.packing import pack_pass
from services.engine.pass_handle import (
    AheadPass,
    JointChoice,
    PassHandle,
    PassTiming,
    SubmittedPass,
)
from services.engine.pass_memory import PassMemory
from services.engine.side_by_side import PlainBranches, PlainChain, SideBySide
from services.engine.slot_table import SlotTable
from services.engine.traced_forward import TracedForward
from services.kernels.cuda.host_rows import ReadRows, pending
from services.kernels.register import kernels
from services.kv.branching import BranchingState
from services.kv.cache import KVStore
from services.kv.layered import LayeredState
from services.kv.state import SequenceState
from services.mlx.launching import compute_in_pieces, launch, launch_in_pieces

_log = logging.getLogger(__name__)


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

    def run(self, passes: Sequence[SubmittedPass]) -> None:
        """Compute these in one pass, or one by one if that fails; each gets its part or an error.

        A sequence that the model cannot take must not fail the others.
        """
        lengths = [handle.state.length for handle in passes]
        try:
            self._run(passes)
        except Exception as error:  # noqa: BLE001
            if self.table is not None:
                self.table.give_up_pass()
            for handle, length in zip(passes, lengths, strict=True):
                if handle.state.length > length:
                    handle.state.commit(length)
            if len(passes) == 1:
                passes[0].error = error
                return
            _log.exception("a pass of %d sequences failed; now one by one", len(passes))
            for handle in passes:
                self.run([handle])

    def compute(
        self,
        tokens: Tokens,
        state: SequenceState,
        begin: Callable[[], Tokens],
        inputs: Callable[[], mx.array] | None = None,
    ) -> mx.array:
        """Return the logits [n, head] of a sequence's pass; arguments as for `SubmittedPass`.

        Raises any error of the model for these tokens.
        """
        handle = SubmittedPass(state=state, new=tokens, begin=begin, inputs=inputs)
        self.run([handle])
        return handle.result()

    def advance(
        self, store: KVStore, span: Span, depth: int, *, is_trunk: bool = False
    ) -> SideBySide:
        """Return passes over rows that advance together, the first of them over this span.

        Args:
            store: holds their keys and values.
            span: of branches, or of the next tokens of the trunk.
            depth: number of passes.
            is_trunk: True if the row is the trunk.
        """
        if self.traced is not None and (span.count == 1 or not is_trunk):
            rows = self.traced.open(store, span, depth, is_trunk=is_trunk)
            if rows is not None:
                return rows
        return PlainChain(self.model, store) if is_trunk else PlainBranches(self.model, store, span)

    def run_ahead(
        self, choice: mx.array, states: Sequence[SequenceState], missing: Sequence[int]
    ) -> Sequence[PassHandle]:
        """Start a pass over tokens that were chosen after a running one and have not been read.

        Args:
            choice: [sequences] of `device.begin`; the pass is of no use to a sequence without a
                token.
            states: without the tokens of this pass, also afterwards; several are of slots, which
                may be anywhere in it.
            missing: number of tokens of the running pass that each lacks, too.

        Returns:
            A handle per sequence; none if a shared pass fails, which it will again when submitted.
        """
        token = mx.maximum(choice, 0)
        # Before the pass is built, so that reading them does not wait for later work.
        launch(choice, token)
        if len(states) == 1:
            return [self._run_one_ahead(token, states[0])]
        return self._run_several_ahead(token, states, missing)

    def _run_one_ahead(self, token: mx.array, state: SequenceState) -> AheadPass:
        length = state.length
        state.append(1)
        try:
            logits, features = self._build(token[None], [state], {}, ahead=True)
        except BaseException:
            state.commit(length)
            raise
        suspended = state.suspend()
        read: Any = cache(token.tolist)
        launch(logits)
        return AheadPass(
            state=state,
            timing=PassTiming(1, 1),
            logits=logits,
            features=features,
            read=read,
            resume=partial(state.resume, suspended),
        )

    def _run_several_ahead(
        self, token: mx.array, states: Sequence[SequenceState], missing: Sequence[int]
    ) -> list[AheadPass]:
        lengths = [state.length for state in states]
        try:
            if self.memory is not None:
                counts = (1 + count for count in missing)
                self.memory.check(list(zip(states, counts, strict=True)))
            for state, count in zip(states, missing, strict=True):
                state.append(count)
                state.append(1)
            timing = PassTiming(len(states), len(states))
            logits, features = self._build(token[None], states, {}, ahead=True)
            joint = JointChoice(logits)
            tokens = joint.lazy
        # An error occurs again, and is reported, when the pass is submitted.
        except Exception as error:  # noqa: BLE001
            _log.info("no pass of %d sequences begins ahead: %s", len(states), error)
            return []
        finally:
            for state, length in zip(states, lengths, strict=True):
                state.commit(length)
        read: Any = cache(token.tolist)
        handles = [
            AheadPass(
                state=state,
                timing=timing,
                row=row,
                logits=logits[row : row + 1],
                features=None if features is None else features[row : row + 1],
                joint=joint,
                read=read,
                resume=partial(state.append, 1),
            )
            for row, state in enumerate(states)
        ]
        launch(tokens)
        return handles

    def _run(self, passes: Sequence[SubmittedPass]) -> None:
        if self.memory is not None:
            self.memory.check([(handle.state, len(handle.new)) for handle in passes])
        row: Tokens = []
        ends = []
        inputs = []
        for handle in passes:
            row += [*handle.begin(), *handle.new]
            ends.append(len(row))
            if handle.inputs is not None:
                inputs.append(handle.inputs())
        timing = PassTiming(len(row), len(passes))
        states = [handle.state for handle in passes]
        extra = {"states": mx.concatenate(inputs, axis=1)} if inputs else {}
        logits, features = self._build(mx.array(row)[None], states, extra)
        joint = JointChoice(logits) if len(passes) > 1 else None
        for handle, end in zip(passes, ends, strict=True):
            rows = slice(end - len(handle.new), end)
            handle.logits, handle.timing, handle.row = logits[rows], timing, rows.start
            handle.joint = joint
            handle.features = None if features is None else features[rows]

    def _build(
        self,
        row: mx.array,
        states: Sequence[SequenceState],
        extra: dict[str, mx.array],
        *,
        ahead: bool = False,
    ) -> tuple[mx.array, ReadRows | None]:
        """Return lazy [rows, head] logits of a pass and [rows or more, width] features.

        Evaluating the logits evaluates the features as well: they are submitted first.
        """
        logits = self._call(row, states, extra, ahead=ahead)[0]
        if self.one_graph and not ahead and isinstance(states[0], KVStore | LayeredState):
            split = compute_in_pieces if self.fills else launch_in_pieces
            split(states[0].milestones)
        features = self.read() if self.read is not None else None
        if features is not None:
            logits = mx.depends(logits, pending(features))
        return logits, features

    def _call(
        self,
        row: mx.array,
        states: Sequence[SequenceState],
        extra: dict[str, mx.array],
        *,
        ahead: bool,
    ) -> mx.array:
        state, table = states[0], self.table
        if isinstance(state, BranchingState) and state.is_batched:
            batch: mx.array = self.model(row.swapaxes(0, 1), cache=state.caches)
            return batch.swapaxes(0, 1)
        if table is not None and (seated := self._run_at(table, row, states, extra)) is not None:
            return seated
        if len(states) > 1:
            with pack_pass(states, in_batches=kernels().batches_recurrences) as caches:
                packed: mx.array = self.model(row, cache=caches, **extra)
            return packed
        if (
            self.traced is not None
            and isinstance(state, KVStore)
            and self.traced.serves(state, ahead=ahead)
        ):
            return self.traced(row, state, ahead=ahead)
        logits: mx.array = self.model(row, cache=state.caches, **extra)
        if table is not None:
            table.drop_if_empty()
        return logits

    def _run_at(
        self,
        table: SlotTable,
        row: mx.array,
        states: Sequence[SequenceState],
        extra: dict[str, mx.array],
    ) -> mx.array | None:
        """Return the logits, if the table supports such a pass."""
        stores = [state for state in states if isinstance(state, KVStore)]
        if extra or len(stores) < len(states):
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
