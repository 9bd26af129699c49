"""Forward passes that wait for each other: who needs one first runs it, with all that wait."""

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
from services.kv.branching import BranchingState
from services.kv.cache import KVStore
from services.kv.layered import LayeredState
from services.kv.state import SequenceState
from services.mlx.cuda.host_rows import ReadRows, pending
from services.mlx.launching import compute_in_pieces, launch_in_pieces
from services.mlx.loader import compute_unit
from services.sampling import device

_log = logging.getLogger(__name__)


def most_rows() -> int:
    """Tokens of a shared pass. On a CPU the kernel for few rows ends here (`mlx.blas`)."""
    return 16 if compute_unit() == "cpu" else 64


@dataclass
class ForwardPass:
    """One forward pass over the tokens of one or several sequences."""

    rows: int
    sequences: int
    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    """Seconds that the model was idle before; for whoever keeps the times."""
    ended: float = 0.0
    """When its first result was there; likewise."""
    logits: mx.array | None = None
    """[rows, vocabulary] of a shared pass, until the likeliest tokens are known."""
    features: ReadRows | None = None
    """[rows or more, width] of what is read of the model beside its logits, in the making."""
    _choice: mx.array | None = None
    _best: npt.NDArray[np.int32] | None = None

    def choose(self) -> mx.array:
        """The likeliest token after each row, in the making, negative if a logit is NaN."""
        if self._choice is None:
            if self.logits is None:
                raise RuntimeError("a pass of one sequence has no common choice")
            self._choice = device.begin(self.logits, [], Sampling())
        return self._choice

    def best(self, rows: slice) -> npt.NDArray[np.int32]:
        """Tokens that `choose` picked for these rows.

        Of all rows at once: each sequence's own way to the host would cost a launch and a wait.
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
    """Begins the pass on the state, right before it; gives what is fed before the tokens."""
    inputs: Callable[[], mx.array] | None = None
    """After `begin`, what the model takes beside the tokens: [1, tokens, width] `states`."""
    logits: mx.array | None = None
    """[tokens, head], lazy."""
    row: int = 0
    """The first of these in its pass."""
    features: ReadRows | None = None
    """[tokens, width] of what is read of the model beside its logits, lazy."""
    best: Callable[[], npt.NDArray[np.int32]] | None = None
    """The likeliest tokens, where they are found for all sequences of a pass at once."""
    by: ForwardPass = field(default_factory=lambda: ForwardPass(0, 0))
    error: Exception | None = None

    @property
    def is_computed(self) -> bool:
        """True if the pass that it was part of was run, or failed."""
        return self.logits is not None or self.error is not None


class TracedPass(Protocol):
    """Runs passes of shapes that are traced."""

    def serves(self, store: KVStore, *, ahead: bool = False) -> bool:
        """Return whether the store's current frame is of such a shape.

        Args:
            store: of the sequence.
            ahead: whether the pass begins behind one that is under way.
        """
        ...

    def __call__(self, tokens: mx.array, store: KVStore, *, ahead: bool = False) -> mx.array:
        """[1, n, head] logits of [1, n] tokens, lazy; they are the current frame's."""
        ...


class Batcher:
    """Collects what sequences ask of a model, and runs it in as few passes as allowed.

    A pass has at most `most_rows` tokens, unless a single sequence asks for more. `traced`
    runs the passes of one sequence that it serves. `read` returns what was read of the model in
    its last pass, None if nothing is. `memory` refuses passes that do not fit.
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
        """Of the slots of sequences that share passes, where one attention serves all of them."""
        self.fills = False
        """Whether the passes are over prompts, which a table takes alone, too, if they suit it."""
        self.one_graph = False
        """Whether MLX makes one graph of what it is given at once, so that passes go in pieces."""
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
        """Note that a sequence wants these tokens computed; nothing happens yet."""
        asked = BatchRequest(tokens, state, begin, inputs)
        self._waiting.append(asked)
        return asked

    def withdraw(self, asked: BatchRequest) -> None:
        """It is not wanted any more; fine if it has been computed."""
        if asked in self._waiting:
            self._waiting.remove(asked)

    def result(self, asked: BatchRequest) -> tuple[mx.array, ForwardPass]:
        """Its logits and pass; unless another one took it along, computed now with what waits.

        Raises whatever the model raises on these tokens.
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
        """True if anything was submitted that is not computed yet."""
        return bool(self._waiting)

    def begin(
        self, tokens: mx.array, states: Sequence[SequenceState], under_way: Sequence[int]
    ) -> tuple[mx.array, ForwardPass]:
        """Build a pass over one token of each of these, behind others that are under way.

        Args:
            tokens: [sequences], in the making.
            states: without the tokens that are under way; they end with all of them.
            under_way: how many of each these are.
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
        """Build a pass over one token of a sequence; it is the state's current frame.

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
        lengths = [asked.state.length for asked in asks]
        try:
            self._forward(asks)
        # A sequence that the model cannot take must not take the others down.
        except Exception as error:  # noqa: BLE001
            if self.table is not None:
                self.table.give_up_pass()
            for asked, length in zip(asks, lengths, strict=True):
                if asked.state.length > length:
                    asked.state.commit(length)
            if len(asks) == 1:
                asks[0].error = error
                return
            _log.exception("a pass of %d sequences failed; now one by one", len(asks))
            for asked in asks:
                self._run([asked])

    def _forward(self, asks: list[BatchRequest]) -> None:
        if self._memory is not None:
            self._memory.check([(asked.state, len(asked.tokens)) for asked in asks])
        row: Tokens = []
        ends = []
        inputs = []
        for asked in asks:
            row += [*asked.begin(), *asked.tokens]
            ends.append(len(row))
            if asked.inputs is not None:
                inputs.append(asked.inputs())
        now = ForwardPass(len(row), len(asks))
        states = [asked.state for asked in asks]
        beside = {"states": mx.concatenate(inputs, axis=1)} if inputs else {}
        logits, now.features = self._build(mx.array(row)[None], states, beside)
        for asked, end in zip(asks, ends, strict=True):
            rows = slice(end - len(asked.tokens), end)
            asked.logits, asked.by, asked.row = logits[rows], now, rows.start
            if len(asks) > 1:
                now.logits, asked.best = logits, partial(now.best, rows)
            asked.features = None if now.features is None else now.features[rows]

    def _build(
        self,
        row: mx.array,
        states: list[SequenceState],
        beside: dict[str, mx.array],
        *,
        ahead: bool = False,
    ) -> tuple[mx.array, ReadRows | None]:
        """[rows, head] logits of a pass and [rows or more, width] features, lazy.

        Who asks for the logits has the features computed in the same go: they are sent first.
        """
        logits = self._call(row, states, beside, ahead=ahead)[0]
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
        beside: dict[str, mx.array],
        *,
        ahead: bool,
    ) -> mx.array:
        state = states[0]
        if isinstance(state, BranchingState) and state.is_batched:
            batch: mx.array = self._model(row.swapaxes(0, 1), cache=state.caches)
            return batch.swapaxes(0, 1)
        if (seated := self._run_at_table(row, states, beside)) is not None:
            return seated
        if len(states) > 1:
            with pack_pass(states, in_batches=batches_recurrences()) as caches:
                logits: mx.array = self._model(row, cache=caches, **beside)
        elif (replayed := self._replay(row, state, ahead=ahead)) is not None:
            logits = replayed
        else:
            logits = self._model(row, cache=state.caches, **beside)
            if self.table is not None:
                self.table.drop_if_empty()
        return logits

    def _replay(self, row: mx.array, state: SequenceState, *, ahead: bool) -> mx.array | None:
        """The logits of a sequence's current frame, if a trace serves it."""
        if self.traced is None or not isinstance(state, KVStore):
            return None
        if not self.traced.serves(state, ahead=ahead):
            return None
        return self.traced(row, state, ahead=ahead)

    def _run_at_table(
        self, row: mx.array, states: list[SequenceState], beside: dict[str, mx.array]
    ) -> mx.array | None:
        """The logits, if the table is for such a pass."""
        stores = [state for state in states if isinstance(state, KVStore)]
        if self.table is None or beside or len(stores) < len(states):
            return None
        if self.fills:
            suits = self.table.suits_prompts(stores)
        else:
            suits = len(stores) > 1 or self.table.is_shared_by(stores[0])
        return self.table.run(self._model, row, stores) if suits else None
