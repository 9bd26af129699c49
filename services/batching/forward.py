"""Forward passes shared by waiting sequences: the first to need its result runs it for all."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.messages import Sampling, Tokens
from services.batching.packing import batches_recurrences, pack_pass
from services.batching.pass_memory import PassMemory
from services.batching.slot_table import SlotTable
from services.kernels.cuda.host_rows import ReadRows, pending
from services.kv.branching import BranchingState
from services.kv.cache import KVStore
from services.kv.layered import LayeredState
from services.kv.state import SequenceState
from services.mlx.launching import compute_in_pieces, launch_in_pieces
from services.mlx.loader import compute_unit
from services.sampling import device

_log = logging.getLogger(__name__)


def most_rows() -> int:
    """Return the most tokens of a shared pass."""
    return 16 if compute_unit() == "cpu" else 64


@dataclass
class ForwardPass:
    """One forward pass over the tokens of one or several sequences."""

    rows: int
    sequences: int
    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    """Seconds that the model was idle before, for statistics."""
    ended: float = 0.0
    """Time of its first result, for statistics."""
    logits: mx.array | None = None
    """[rows, vocabulary] of a shared pass, until the argmax tokens are chosen."""
    features: ReadRows | None = None
    """[rows or more, width] of the states read from the model, lazy."""
    _choice: mx.array | None = None
    _best: npt.NDArray[np.int32] | None = None

    def choose(self) -> mx.array:
        """Return the argmax token after each row, lazy, negative if a logit is NaN."""
        if self._choice is None:
            if self.logits is None:
                raise RuntimeError("a pass of one sequence has no shared choice of tokens")
            self._choice = device.begin(self.logits, [], Sampling())
        return self._choice

    def best(self, rows: slice) -> npt.NDArray[np.int32]:
        """Return the tokens that `choose` picked for these rows.

        All rows are fetched at once: a separate transfer per sequence would cost a launch and a
        wait.
        """
        chosen: Any = self._best
        if chosen is None:
            chosen = np.array(self.choose())
            self._best, self.logits = chosen, None
        own: npt.NDArray[np.int32] = chosen[rows]
        return own


@dataclass(eq=False)
class BatchRequest:
    """Tokens of one sequence that are to go through the model."""

    tokens: Tokens
    state: SequenceState
    begin: Callable[[], Tokens]
    """Begins the pass on the state, right before it runs; returns the tokens fed before these."""
    inputs: Callable[[], mx.array] | None = None
    """After `begin`, the model's input besides the tokens: [1, tokens, width] `states`."""
    logits: mx.array | None = None
    """[tokens, head], lazy."""
    row: int = 0
    """The first of these in its pass."""
    features: ReadRows | None = None
    """[tokens, width] of the states read from the model, lazy."""
    best: Callable[[], npt.NDArray[np.int32]] | None = None
    """The argmax tokens, where they are computed for all sequences of a pass at once."""
    by: ForwardPass = field(default_factory=lambda: ForwardPass(0, 0))
    error: Exception | None = None

    @property
    def is_computed(self) -> bool:
        """True if its pass has run or failed."""
        return self.logits is not None or self.error is not None


class TracedPass(Protocol):
    """Runs passes of traced shapes."""

    def serves(self, store: KVStore, *, ahead: bool = False) -> bool:
        """Return True if the store's current frame has such a shape.

        Args:
            store: of the sequence.
            ahead: True if the pass starts while another one is running.
        """
        ...

    def __call__(self, tokens: mx.array, store: KVStore, *, ahead: bool = False) -> mx.array:
        """Compute lazy logits [1, n, head] of the current frame, [1, n] tokens."""
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
        self._waiting: list[BatchRequest] = []

    def submit(
        self,
        tokens: Tokens,
        state: SequenceState,
        begin: Callable[[], Tokens],
        inputs: Callable[[], mx.array] | None = None,
    ) -> BatchRequest:
        """Queue a sequence's tokens; nothing runs yet."""
        request = BatchRequest(tokens, state, begin, inputs)
        self._waiting.append(request)
        return request

    def withdraw(self, asked: BatchRequest) -> None:
        """Drop a request; no effect if it has been computed."""
        if asked in self._waiting:
            self._waiting.remove(asked)

    def result(self, asked: BatchRequest) -> tuple[mx.array, ForwardPass]:
        """Return a request's logits and pass; run it with all waiting ones if necessary.

        Raises any error of the model for these tokens.
        """
        if not asked.is_computed:
            self._run(self._with_company(asked))
        if asked.error is not None:
            raise asked.error
        if asked.logits is None:
            raise RuntimeError("a pass has lost one of its sequences")
        return asked.logits, asked.by

    @property
    def has_waiting(self) -> bool:
        """True if a submitted request is not computed yet."""
        return bool(self._waiting)

    def begin(
        self, tokens: mx.array, states: Sequence[SequenceState], under_way: Sequence[int]
    ) -> tuple[mx.array, ForwardPass]:
        """Build a pass over one token of each sequence, after others that are running.

        Args:
            tokens: [sequences], lazy.
            states: without the tokens of running passes; they end with all of them.
            under_way: number of such tokens of each.
        """
        if self._memory is not None:
            self._memory.check(
                [(state, 1 + own) for state, own in zip(states, under_way, strict=True)]
            )
        for state, own in zip(states, under_way, strict=True):
            state.append(own)
            state.append(1)
        now = ForwardPass(len(states), len(states))
        now.logits, now.features = self._build(tokens[None], list(states), {}, ahead=True)
        return now.logits, now

    def begin_alone(
        self, token: mx.array, state: SequenceState
    ) -> tuple[mx.array, ReadRows | None]:
        """Build a pass over one token of a sequence, the state's current frame.

        Returns:
            [1, head] logits and [1, width] features, None if nothing is read; both lazy.
        """
        return self._build(token[None], [state], {}, ahead=True)

    def _with_company(self, asked: BatchRequest) -> list[BatchRequest]:
        self.withdraw(asked)
        chosen, rows = [asked], len(asked.tokens)
        for other in list(self._waiting):
            rows += len(other.tokens)
            if rows > self.most_rows:
                break
            chosen.append(other)
            self._waiting.remove(other)
        return chosen

    def _run(self, asks: list[BatchRequest]) -> None:
        lengths = [request.state.length for request in asks]
        try:
            self._forward(asks)
        # A sequence that the model cannot take must not fail the others.
        except Exception as error:  # noqa: BLE001
            if self.table is not None:
                self.table.give_up_pass()
            for request, length in zip(asks, lengths, strict=True):
                if request.state.length > length:
                    request.state.commit(length)
            if len(asks) == 1:
                asks[0].error = error
                return
            _log.exception("a pass of %d sequences failed; now one by one", len(asks))
            for request in asks:
                self._run([request])

    def _forward(self, asks: list[BatchRequest]) -> None:
        if self._memory is not None:
            self._memory.check([(request.state, len(request.tokens)) for request in asks])
        row: Tokens = []
        ends = []
        inputs = []
        for request in asks:
            row += [*request.begin(), *request.tokens]
            ends.append(len(row))
            if request.inputs is not None:
                inputs.append(request.inputs())
        now = ForwardPass(len(row), len(asks))
        states = [request.state for request in asks]
        extra = {"states": mx.concatenate(inputs, axis=1)} if inputs else {}
        logits, now.features = self._build(mx.array(row)[None], states, extra)
        for request, end in zip(asks, ends, strict=True):
            rows = slice(end - len(request.tokens), end)
            request.logits, request.by, request.row = logits[rows], now, rows.start
            if len(asks) > 1:
                now.logits, request.best = logits, partial(now.best, rows)
            request.features = None if now.features is None else now.features[rows]

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
        """Return the logits of a sequence's current frame, if a trace serves it."""
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
