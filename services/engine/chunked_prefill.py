"""Chunked prefill of the target's KV; short prompts share a pass.

A pass over few tokens costs nearly as much as one over many, so the short prompts of several new
requests are computed together, and a long one lets them go first (`PrefillOrder`). A prompt that
starts like one in progress waits for that one, and forks its KV.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from protocol.decoding.tokens import common_prefix_length
from protocol.messages import Tokens
from services.engine.batch import BatchPart
from services.engine.pass_handle import PassQueue
from services.engine.runner import ModelRunner
from services.engine.slot_table import SlotTable
from services.kernels.cuda.host_rows import ReadRows
from services.kernels.register import kernels
from services.kv.state import SequenceState

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
_TOKENS_PER_S = 500.0
"""Default speed of a model that has not been measured; only the order depends on it."""
_AGEING = 0.25
"""Seconds of work that a second of waiting counts for.

It is less than 1, so that of two equal prompts the one in progress is finished first.
"""


@dataclass
class _Waiting:
    tokens: int
    """Still to be computed."""
    since: float
    served_s: float = 0.0


class PrefillOrder:
    """Order of the prompts in progress: the shortest remaining one first, with ageing.

    It is decided again before every chunk, so that a short prompt does not wait for a long one. A
    prompt that has waited four times as long as it still needs goes before any other: none waits
    for ever. Times are in seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._tokens_per_s = _TOKENS_PER_S

    def add(self, number: int, tokens: int, now: float) -> None:
        """Add a sequence with `tokens` tokens to compute."""
        self._waiting[number] = _Waiting(tokens, now)

    def remove(self, number: int) -> None:
        """Remove a finished or cancelled sequence."""
        self._waiting.pop(number, None)

    def on_chunk(self, number: int, tokens: int, seconds: float) -> None:
        """Record a computed chunk of `tokens` tokens and the duration of its pass."""
        one = self._waiting[number]
        one.tokens -= tokens
        one.served_s += seconds
        if tokens and seconds > 0.0:
            self._tokens_per_s = tokens / seconds

    def may_go(self, number: int, room: int, now: float) -> bool:
        """Return True if it may use part of the next pass, which takes `room` tokens.

        Sequences before it in the order come first; the room they leave is for others.
        """
        for other in sorted(self._waiting, key=lambda one: self._key(one, now)):
            if other == number:
                return True
            room -= self._waiting[other].tokens
            if room <= 0:
                return False
        return True

    def _key(self, number: int, now: float) -> tuple[float, int]:
        one = self._waiting[number]
        waited_s = max(0.0, now - one.since - one.served_s)
        return one.tokens / self._tokens_per_s - _AGEING * waited_s, number


class Prompted(Protocol):
    """A sequence whose prompt is being computed."""

    tokens: Tokens
    """The tokens its state holds."""
    state: SequenceState


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
        sizes_recur = kernels().plans_shapes
        self._short = short and not sizes_recur
        self._most = step * (_STEPS_ALONE if sizes_recur else 1)
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
        runner: runs the passes; its memory check shortens chunks that do not fit, or refuses them.
        step: most tokens of a pass, except on CUDA when no other request waits.
        checkpoints: True if later prompts may start in the middle of one.
        end_ids: tokens that end a message of a chat.
        log: keeps what was read of a sequence, from a position on.
    """

    def __init__(
        self,
        runner: ModelRunner,
        step: int,
        *,
        shares: bool = False,
        checkpoints: bool = False,
        end_ids: Collection[int] = (),
        log: Callable[[Any, int, ReadRows | None], object] = lambda *_: None,
    ) -> None:
        """Compute prompts in passes of their own, unless `shares` or told to `share` them."""
        self._checkpoints = checkpoints
        self._end_ids = frozenset(end_ids)
        self._log_rows = log
        self.runner, self._queue = runner, PassQueue(runner)
        runner.fills = True
        self._shares = shares
        self.chunk_sizer = ChunkSizer(step)
        self._grid = min(step, _GRID)
        self._least_turn = self._grid // _TURNS
        self._order = PrefillOrder()
        self.prompts: dict[int, Tokens] = {}
        """Sequence -> its prompt in progress."""

    def share(self, table: SlotTable | None, *, prompts: bool) -> None:
        """Compute several prompts in a pass from now on, if `prompts`, and in a slot table."""
        self.runner.table, self._shares = table, prompts

    def is_coming(self, tokens: Tokens, held: int) -> bool:
        """Return True if a prompt in progress covers half of `tokens` beyond the first `held`."""
        common = max(
            (common_prefix_length(tokens, other) for other in self.prompts.values()), default=0
        )
        return common - held >= max(_WORTH, (len(tokens) - held) / 2)

    @contextlib.contextmanager
    def register(self, number: int, tokens: Tokens) -> Iterator[None]:
        """Register this prompt while it is in progress, so that others can wait for its KV."""
        self.prompts[number] = tokens
        try:
            yield
        finally:
            del self.prompts[number]
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
            size = self._size(state, tokens, alone=alone() and len(self.prompts) < 2)
            if not self._order.may_go(number, size, time.perf_counter()):
                yield  # let another prompt run
                continue
            chunk = tokens[state.length : state.length + size]
            begin = partial(state.append, len(chunk), whole=True)
            submission = self._queue.submit(BatchPart(state, len(chunk), begin, chunk))
            try:
                yield
                self._queue.most_rows = size if self._shares else 0
                began, own = time.perf_counter(), submission.waits
                handle = self._queue.result(submission)
                state.commit(state.length)
                # The logits stay unevaluated: MLX is lazy and only the state is evaluated.
                state.evaluate()
                self._log_rows(sequence, len(sequence.tokens), handle.features)
            finally:
                submission.cancel()
            self._order.on_chunk(number, len(chunk), time.perf_counter() - began)
            sequence.tokens += chunk
            if state.needs_checkpoints and self._checkpoints:
                state.checkpoint(ends_turn=chunk[-1] in self._end_ids)
            if own:
                self.chunk_sizer.observe(handle.timing.rows, time.perf_counter() - began)
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
        size = self.chunk_sizer.size(alone=alone, left=len(tokens) - state.length)
        memory = self.runner.memory
        return size if memory is None else memory.fit(state, size, min(size, LEAST_CHUNK))
