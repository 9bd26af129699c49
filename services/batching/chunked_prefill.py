"""Prompts on their way into the target's KV: in pieces, and those that wait share a pass.

A pass over few tokens costs nearly as much as one over many, so the short prompts of several
new requests are computed together, and a long one lets them by (`prefill_order`). A prompt that
begins like one in work waits for that one, and takes its KV.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Iterator
from functools import partial
from typing import Any, Protocol

from protocol.decoding.tokens import common_prefix_length
from protocol.messages import Tokens
from services.batching.forward import Batcher
from services.batching.pass_memory import PassMemory
from services.batching.prefill_order import PrefillOrder
from services.batching.slot_table import SlotTable
from services.kv.state import SequenceState
from services.mlx.cuda.host_rows import ReadRows
from services.mlx.loader import compute_unit

_WORTH = 8
"""Tokens that a wait for another prompt's KV must save, at least."""

_STALL_S = 0.25
"""How long the answers that are being decoded may wait for a piece of another's prompt."""
_GRID = 256
"""Distance of checkpoints in a prompt, unless the chunks that were asked for are smaller."""
_TURNS = 4
"""Messages that end within that distance may have a checkpoint each."""
_FIRST = 32
LEAST_CHUNK = 16
"""Tokens."""
_STEPS_ALONE = 4
"""In a chunk on CUDA that nobody waits for: between two chunks the GPU waits for the host."""


class Prompted(Protocol):
    """A sequence whose prompt is computed."""

    tokens: Tokens
    """What its state holds."""
    state: SequenceState


class Reader(Protocol):
    """Reader of further outputs of the model, besides its logits."""

    def take(self) -> ReadRows | None:
        """[tokens, width] of the last pass, lazy; None if nothing is read."""
        ...

    def log(self, sequence: Any, position: int, rows: ReadRows | None) -> object:
        """Keep the rows of a sequence's tokens from `position` on."""
        ...


class ChunkSizer:
    """Learns how fast prompts are computed; fed with every chunk."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._most = step * (_STEPS_ALONE if compute_unit() == "cuda" else 1)
        self._tokens_per_s = 0.0

    def size(self, *, alone: bool, left: int = 0) -> int:
        """Tokens of the next chunk.

        Args:
            alone: whether nobody waits meanwhile.
            left: tokens still to be computed. A chunk that is longer than a step is a power of two
                times as long, so that sizes recur: CUDA plans for each.
        """
        if alone:
            size = self._most
            while size > max(left, self._step):
                size //= 2
            return max(size, self._step)
        if not self._tokens_per_s:
            return min(self._step, _FIRST)
        return min(self._step, max(LEAST_CHUNK, int(_STALL_S * self._tokens_per_s)))

    def observe(self, tokens: int, seconds: float) -> None:
        """A chunk was computed."""
        if seconds > 0.0:
            self._tokens_per_s = tokens / seconds


class ChunkedPrefill:
    """Computes prompts.

    Args:
        model: the target.
        step: most tokens of a pass, but for those that nobody waits behind on CUDA.
        shares: whether the model takes several sequences in a pass (`packing`).
        checkpoints: whether later prompts may begin in the middle of one.
        end_ids: tokens that end a message of a chat.
        reader: keeps what a drafter reads of the model.
        memory: shortens chunks that do not fit, or refuses them.
        table: of the slots of sequences that share passes, where there is one.
        one_graph: see `Batcher`.
    """

    def __init__(
        self,
        model: Any,
        step: int,
        *,
        shares: bool,
        checkpoints: bool = False,
        end_ids: Collection[int] = (),
        reader: Reader | None = None,
        memory: PassMemory | None = None,
        table: SlotTable | None = None,
        one_graph: bool = False,
    ) -> None:
        self._checkpoints = checkpoints
        self._end_ids = frozenset(end_ids)
        self._reader = reader
        self._memory = memory
        read = reader.take if reader is not None else None
        self._batcher = Batcher(model, 0, read=read, memory=memory)
        self._batcher.table, self._batcher.fills = table, True
        self._batcher.one_graph = one_graph
        self._shares = shares
        self._chunk_sizer = ChunkSizer(step)
        self._grid = min(step, _GRID)
        self._least_turn = self._grid // _TURNS
        self._order = PrefillOrder()
        self._wanted: dict[int, Tokens] = {}
        """By sequence: the prompts in work."""

    @property
    def prompts_in_work(self) -> int:
        """How many there are."""
        return len(self._wanted)

    def is_coming(self, tokens: Tokens, held: int) -> bool:
        """Return whether a prompt in work will hold half of what `tokens` lack beyond `held`."""
        common = max(
            (common_prefix_length(tokens, other) for other in self._wanted.values()), default=0
        )
        return common - held >= max(_WORTH, (len(tokens) - held) / 2)

    @contextlib.contextmanager
    def register(self, number: int, tokens: Tokens) -> Iterator[None]:
        """While this prompt is in work, here or elsewhere, others may wait for its KV."""
        self._wanted[number] = tokens
        try:
            yield
        finally:
            del self._wanted[number]
            self._order.remove(number)

    def fill(
        self, number: int, sequence: Prompted, tokens: Tokens, alone: Callable[[], bool]
    ) -> Generator[None]:
        """Make the KV hold these tokens; yields where others may join in or have their turn.

        Args:
            number: under which the prompt was registered.
            sequence: holds a beginning of the tokens.
            tokens: of the whole prompt.
            alone: whether no answer waits meanwhile.
        """
        state = sequence.state
        self._order.add(number, len(tokens) - state.length, time.perf_counter())
        while state.length < len(tokens):
            size = self._size(state, tokens, alone=alone() and self.prompts_in_work < 2)
            if not self._order.may_go(number, size, time.perf_counter()):
                yield  # another prompt's turn
                continue
            chunk = tokens[state.length : state.length + size]
            asked = self._batcher.submit(chunk, state, partial(_begin_chunk, state, len(chunk)))
            try:
                yield
                self._batcher.most_rows = size if self._shares else 0
                began, own = time.perf_counter(), asked.logits is None
                _, by = self._batcher.result(asked)
                state.commit(state.length)
                # The logits stay uncomputed: MLX is lazy and only the state is asked for.
                state.evaluate()
                if self._reader is not None:
                    self._reader.log(sequence, len(sequence.tokens), asked.features)
            finally:
                self._batcher.withdraw(asked)
            self._order.on_chunk(number, len(chunk), time.perf_counter() - began)
            sequence.tokens += chunk
            if state.needs_checkpoints and self._checkpoints:
                state.checkpoint(ends_turn=chunk[-1] in self._end_ids)
            if own:
                self._chunk_sizer.observe(by.rows, time.perf_counter() - began)
            yield

    def _size(self, state: SequenceState, tokens: Tokens, *, alone: bool) -> int:
        """Most tokens of the next chunk.

        Where forks begin at checkpoints, chunks end at multiples of a length, and with messages
        of a chat that are not too short: a prompt that is resumed goes through the passes of a
        fresh one, and has its bits.
        """
        if state.needs_checkpoints:
            size = self._grid - state.length % self._grid
            chunk = tokens[state.length : state.length + size]
            ends = range(self._least_turn, len(chunk))
            return next((end for end in ends if chunk[end - 1] in self._end_ids), size)
        size = self._chunk_sizer.size(alone=alone, left=len(tokens) - state.length)
        return (
            size if self._memory is None else self._memory.fit(state, size, min(size, LEAST_CHUNK))
        )


def _begin_chunk(state: SequenceState, size: int) -> Tokens:
    state.append(size, whole=True)
    return []
