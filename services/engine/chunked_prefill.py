"""Chunked prefill of the target's KV; short prompts share a pass.

A pass over few tokens costs nearly as much as one over many, so the short prompts of several new
requests are computed together, and a long one lets them go first (`prefill_order`). A prompt that
starts like one in progress waits for that one, and forks its KV.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Iterator
from functools import partial
from typing import Any, Protocol

from protocol.decoding.tokens import common_prefix_length
from protocol.messages import Tokens
from services.engine.forward import Batcher
from services.engine.pass_memory import PassMemory
from services.engine.prefill_order import PrefillOrder
from services.engine.slot_table import SlotTable
from services.kernels.cuda.host_rows import ReadRows
from services.kv.state import SequenceState
from services.mlx.loader import compute_unit

_WORTH = 8
"""Minimum number of tokens that waiting for another prompt's KV must save."""

_STALL_S = 0.25
"""Longest delay of running decodes by a chunk of another request's prompt."""
_LONGEST_S = 2.0
"""Of a chunk: between two of them a service gives a sign of life."""
_GRID = 256
"""Distance of checkpoints in a prompt, unless the configured chunks are smaller."""
_TURNS = 4
"""Messages ending within that distance that may each have a checkpoint."""
_FIRST = 32
LEAST_CHUNK = 16
"""Smallest chunk in tokens."""
_STEPS_ALONE = 4
"""Steps per chunk on CUDA when nothing else waits: between two chunks the GPU waits for the host.
"""


class Prompted(Protocol):
    """A sequence whose prompt is being computed."""

    tokens: Tokens
    """The tokens its state holds."""
    state: SequenceState


class Reader(Protocol):
    """Reads further outputs of the model, besides its logits."""

    def take(self) -> ReadRows | None:
        """Return [tokens, width] of the last pass, lazy; None if nothing is read."""
        ...

    def log(self, sequence: Any, position: int, rows: ReadRows | None) -> object:
        """Keep the rows of a sequence's tokens from `position` on."""
        ...


class ChunkSizer:
    """Learns the prefill speed from every chunk, to choose the size of the next."""

    def __init__(self, step: int, *, short: bool = False) -> None:
        """Start without a measurement.

        Args:
            step: most tokens of a chunk that others wait for.
            short: True if chunks may depend on the measured speed also where nobody waits: for
                drafters, whose rounding changes no token of an answer.
        """
        self._step = step
        self._short = short and compute_unit() != "cuda"  # CUDA plans for each size
        self._most = step * (1 if compute_unit() != "cuda" else _STEPS_ALONE)
        self._tokens_per_s = 0.0

    def size(self, *, alone: bool, left: int = 0) -> int:
        """Return the tokens of the next chunk.

        Args:
            alone: True if no other request waits meanwhile.
            left: tokens still to be computed. A chunk longer than a step is a power of two times as
                long, so that sizes recur: CUDA plans for each.
        """
        if alone:
            size = self._most
            while size > max(left, self._step):
                size //= 2
            return max(size, self._step) if size > self._step else self._step_in_time()
        if not self._tokens_per_s:
            return min(self._step, _FIRST)
        return min(self._step, max(LEAST_CHUNK, int(_STALL_S * self._tokens_per_s)))

    @property
    def expected_s(self) -> float:
        """Seconds that the longest chunk takes, as measured; 0 if nothing was measured."""
        return self.size(alone=True) / self._tokens_per_s if self._tokens_per_s else 0.0

    def _step_in_time(self) -> int:
        if not self._short or not self._tokens_per_s:
            return self._step
        size = int(_LONGEST_S * self._tokens_per_s) // LEAST_CHUNK * LEAST_CHUNK
        return max(min(LEAST_CHUNK, self._step), min(self._step, size))

    def observe(self, tokens: int, seconds: float) -> None:
        """Record a computed chunk."""
        if seconds > 0.0:
            self._tokens_per_s = tokens / seconds


class ChunkedPrefill:
    """Computes prompts in chunks.

    Args:
        model: the target.
        step: most tokens of a pass, except on CUDA when no other request waits.
        checkpoints: True if later prompts may start in the middle of one.
        end_ids: tokens that end a message of a chat.
        reader: keeps the states that a drafter reads from the model.
        memory: shortens chunks that do not fit, or refuses them.
        one_graph: see `Batcher`.
    """

    def __init__(
        self,
        model: Any,
        step: int,
        *,
        shares: bool = False,
        checkpoints: bool = False,
        end_ids: Collection[int] = (),
        reader: Reader | None = None,
        memory: PassMemory | None = None,
        one_graph: bool = False,
    ) -> None:
        """Compute prompts in passes of their own, unless `shares` or told to `share` them."""
        self._checkpoints = checkpoints
        self._end_ids = frozenset(end_ids)
        self._reader = reader
        self._memory = memory
        read = reader.take if reader is not None else None
        self._batcher = Batcher(model, 0, read=read, memory=memory)
        self._batcher.fills = True
        self._batcher.one_graph = one_graph
        self._shares = shares
        self._chunk_sizer = ChunkSizer(step)
        self._grid = min(step, _GRID)
        self._least_turn = self._grid // _TURNS
        self._order = PrefillOrder()
        self._wanted: dict[int, Tokens] = {}
        """Sequence -> its prompt in progress."""

    def share(self, table: SlotTable | None, *, prompts: bool) -> None:
        """Compute several prompts in a pass from now on, if `prompts`, and in a slot table."""
        self._batcher.table, self._shares = table, prompts

    @property
    def prompts_in_work(self) -> int:
        """Number of prompts in progress."""
        return len(self._wanted)

    @property
    def expected_s(self) -> float:
        """Seconds that the next step takes at most, as measured; 0 without a prompt in work."""
        return self._chunk_sizer.expected_s if self._wanted else 0.0

    def is_coming(self, tokens: Tokens, held: int) -> bool:
        """Return True if a prompt in progress covers half of `tokens` beyond the first `held`."""
        common = max(
            (common_prefix_length(tokens, other) for other in self._wanted.values()), default=0
        )
        return common - held >= max(_WORTH, (len(tokens) - held) / 2)

    @contextlib.contextmanager
    def register(self, number: int, tokens: Tokens) -> Iterator[None]:
        """Register this prompt while it is in progress, so that others can wait for its KV."""
        self._wanted[number] = tokens
        try:
            yield
        finally:
            del self._wanted[number]
            self._order.remove(number)

    def fill(
        self, number: int, sequence: Prompted, tokens: Tokens, alone: Callable[[], bool]
    ) -> Generator[None]:
        """Extend the KV to these tokens; yields where other requests can join or run.

        Args:
            number: under which the prompt was registered.
            sequence: holds a prefix of the tokens.
            tokens: of the whole prompt.
            alone: True if no decode waits meanwhile.
        """
        state = sequence.state
        self._order.add(number, len(tokens) - state.length, time.perf_counter())
        while state.length < len(tokens):
            size = self._size(state, tokens, alone=alone() and self.prompts_in_work < 2)
            if not self._order.may_go(number, size, time.perf_counter()):
                yield  # let another prompt run
                continue
            chunk = tokens[state.length : state.length + size]
            handle = self._batcher.submit(chunk, state, partial(_begin_chunk, state, len(chunk)))
            try:
                yield
                self._batcher.most_rows = size if self._shares else 0
                began, own = time.perf_counter(), handle.logits is None
                self._batcher.result(handle)
                state.commit(state.length)
                # The logits stay unevaluated: MLX is lazy and only the state is evaluated.
                state.evaluate()
                if self._reader is not None:
                    self._reader.log(sequence, len(sequence.tokens), handle.features)
            finally:
                handle.cancel()
            self._order.on_chunk(number, len(chunk), time.perf_counter() - began)
            sequence.tokens += chunk
            if state.needs_checkpoints and self._checkpoints:
                state.checkpoint(ends_turn=chunk[-1] in self._end_ids)
            if own:
                self._chunk_sizer.observe(handle.timing.rows, time.perf_counter() - began)
            yield

    def _size(self, state: SequenceState, tokens: Tokens, *, alone: bool) -> int:
        """Return the most tokens of the next chunk.

        Where forks start at checkpoints, chunks end at multiples of a length, and with chat
        messages that are not too short: a resumed prompt goes through the passes of a fresh one,
        and has the same bits.
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
