"""Forward passes shared by waiting sequences: the first to need its result runs it for all."""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import mlx.core as mx

from protocol.messages import Tokens
from services.engine.packing import batches_recurrences, pack_pass
from services.engine.pass_handle import AheadPass, JointChoice, PassTiming, SubmittedPass
from services.engine.pass_memory import PassMemory
from services.engine.slot_table import SlotTable
from services.kernels.cuda.host_rows import ReadRows, pending
from services.kv.branching import BranchingState
from services.kv.cache import KVStore
from services.kv.layered import LayeredState
from services.kv.state import SequenceState
from services.mlx.launching import compute_in_pieces, launch, launch_in_pieces
from services.mlx.loader import compute_unit

_log = logging.getLogger(__name__)


def most_rows() -> int:
    """Return the most tokens of a shared pass."""
    return 16 if compute_unit() == "cpu" else 64


class TracedPass(Protocol):
    """Runs passes of traced shapes."""

    def serves(self, store: KVStore, *, ahead: bool = False) -> bool:
        """Return True if the store's current pass has such a shape.

        Args:
            store: of the sequence.
            ahead: True if the pass starts while another one is running.
        """
        ...

    def __call__(self, tokens: mx.array, store: KVStore, *, ahead: bool = False) -> mx.array:
        """Compute lazy logits [1, n, head] of the current pass, [1, n] tokens."""
        ...


class Batcher:
    """Collects the tokens that sequences submit, and runs them in as few passes as allowed.

    A pass has at most `most_rows` tokens, unless a single sequence submits more. `traced` runs the
    passes of one sequence that it serves. `read` returns the states read in the last pass, None if
    there are none. `memory` refuses passes that do not fit.
    """

    def __init__(
        self,
        model: Any,
        most_rows: int,
        traced: TracedPass | None = None,
        read: Callable[[], ReadRows | None] | None = None,
        memory: PassMemory | None = None,
    ) -> None:
        self._model = model
        self._memory = memory
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
        self._read = read
        self.traced = traced
        self.most_rows = most_rows
        self._waiting: list[SubmittedPass] = []

    def submit(
        self,
        tokens: Tokens,
        state: SequenceState,
        begin: Callable[[], Tokens],
        inputs: Callable[[], mx.array] | None = None,
    ) -> SubmittedPass:
        """Queue a sequence's tokens; nothing runs yet."""
        handle = SubmittedPass(
            state=state, new=tokens, begin=begin, inputs=inputs, queue=self._waiting
        )
        self._waiting.append(handle)
        return handle

    def result(self, handle: SubmittedPass) -> mx.array:
        """Return the logits of a pass; run it with all waiting ones if necessary.

        Raises any error of the model for these tokens.
        """
        if not handle.is_computed:
            self._run(self._with_company(handle))
        if handle.error is not None:
            raise handle.error
        logits: mx.array = handle.logits
        return logits

    @property
    def has_waiting(self) -> bool:
        """True if a submitted pass has not run yet."""
        return bool(self._waiting)

    def follow(
        self, choice: mx.array, states: Sequence[SequenceState], missing: Sequence[int]
    ) -> list[AheadPass]:
        """Start a pass over the tokens chosen after a running one, before they have been read.

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
            return [self._follow_alone(token, states[0])]
        return self._follow_shared(token, states, missing)

    def _follow_alone(self, token: mx.array, state: SequenceState) -> AheadPass:
        length = state.length
        state.append(1)
        try:
            logits, features = self._build(token[None], [state], {}, ahead=True)
        except BaseException:
            state.commit(length)
            raise
        suspended = state.suspend()
        launch(logits)
        return AheadPass(
            state=state,
            timing=PassTiming(1, 1),
            logits=logits,
            features=features,
            read=_reader(token),
            resume=partial(state.resume, suspended),
        )

    def _follow_shared(
        self, token: mx.array, states: Sequence[SequenceState], missing: Sequence[int]
    ) -> list[AheadPass]:
        lengths = [state.length for state in states]
        try:
            if self._memory is not None:
                counts = (1 + count for count in missing)
                self._memory.check(list(zip(states, counts, strict=True)))
            for state, count in zip(states, missing, strict=True):
                state.append(count)
                state.append(1)
            timing = PassTiming(len(states), len(states))
            logits, features = self._build(token[None], list(states), {}, ahead=True)
            joint = JointChoice(logits)
            tokens = joint.lazy
        # An error occurs again, and is reported, when the pass is submitted.
        except Exception as error:  # noqa: BLE001
            _log.info("no pass of %d sequences begins ahead: %s", len(states), error)
            return []
        finally:
            for state, length in zip(states, lengths, strict=True):
                state.commit(length)
        read = _reader(token)
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

    def _with_company(self, first: SubmittedPass) -> list[SubmittedPass]:
        first.cancel()
        chosen, rows = [first], len(first.new)
        for other in list(self._waiting):
            rows += len(other.new)
            if rows > self.most_rows:
                break
            chosen.append(other)
            other.cancel()
        return chosen

    def _run(self, handles: list[SubmittedPass]) -> None:
        lengths = [handle.state.length for handle in handles]
        try:
            self._forward(handles)
        # A sequence that the model cannot take must not fail the others.
        except Exception as error:  # noqa: BLE001
            if self.table is not None:
                self.table.give_up_pass()
            for handle, length in zip(handles, lengths, strict=True):
                if handle.state.length > length:
                    handle.state.commit(length)
            if len(handles) == 1:
                handles[0].error = error
                return
            _log.exception("a pass of %d sequences failed; now one by one", len(handles))
            for handle in handles:
                self._run([handle])

    def _forward(self, handles: list[SubmittedPass]) -> None:
        if self._memory is not None:
            self._memory.check([(handle.state, len(handle.new)) for handle in handles])
        row: Tokens = []
        ends = []
        inputs = []
        for handle in handles:
            row += [*handle.begin(), *handle.new]
            ends.append(len(row))
            if handle.inputs is not None:
                inputs.append(handle.inputs())
        timing = PassTiming(len(row), len(handles))
        states = [handle.state for handle in handles]
        extra = {"states": mx.concatenate(inputs, axis=1)} if inputs else {}
        logits, features = self._build(mx.array(row)[None], states, extra)
        joint = JointChoice(logits) if len(handles) > 1 else None
        for handle, end in zip(handles, ends, strict=True):
            rows = slice(end - len(handle.new), end)
            handle.logits, handle.timing, handle.row = logits[rows], timing, rows.start
            handle.joint = joint
            handle.features = None if features is None else features[rows]

    def _build(
        self,
        row: mx.array,
        states: list[SequenceState],
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
        features = self._read() if self._read is not None else None
        if features is not None:
            logits = mx.depends(logits, pending(features))
        return logits, features

    def _call(
        self,
        row: mx.array,
        states: list[SequenceState],
        extra: dict[str, mx.array],
        *,
        ahead: bool,
    ) -> mx.array:
        state = states[0]
        if isinstance(state, BranchingState) and state.is_batched:
            batch: mx.array = self._model(row.swapaxes(0, 1), cache=state.caches)
            return batch.swapaxes(0, 1)
        if (seated := self._run_at_table(row, states, extra)) is not None:
            return seated
        if len(states) > 1:
            with pack_pass(states, in_batches=batches_recurrences()) as caches:
                logits: mx.array = self._model(row, cache=caches, **extra)
        elif (replayed := self._replay(row, state, ahead=ahead)) is not None:
            logits = replayed
        else:
            logits = self._model(row, cache=state.caches, **extra)
            if self.table is not None:
                self.table.drop_if_empty()
        return logits

    def _replay(self, row: mx.array, state: SequenceState, *, ahead: bool) -> mx.array | None:
        """Return the logits of a sequence's current pass, if a trace serves it."""
        if self.traced is None or not isinstance(state, KVStore):
            return None
        if not self.traced.serves(state, ahead=ahead):
            return None
        return self.traced(row, state, ahead=ahead)

    def _run_at_table(
        self, row: mx.array, states: list[SequenceState], extra: dict[str, mx.array]
    ) -> mx.array | None:
        """Return the logits, if the table supports such a pass."""
        stores = [state for state in states if isinstance(state, KVStore)]
        if self.table is None or extra or len(stores) < len(states):
            return None
        if self.fills:
            suits = self.table.suits_prompts(stores)
        else:
            suits = len(stores) > 1 or self.table.is_shared_by(stores[0])
        return self.table.run(self._model, row, stores) if suits else None


def _reader(token: mx.array) -> Callable[[], list[int]]:
    """Return a function that reads [count] tokens, once."""
    tolist: Any = token.tolist
    return cache(tolist)
