"""Passes launched before their tokens are known, which wait on the GPU.

Building and launching a pass takes the host milliseconds, during which the device idles if the
tokens come from another process. So the next pass is launched while this one runs. Its first kernel
polls a word of host memory until the host rings, and then reads the tokens next to it. If that does
not happen in time, or the pass is cancelled, it runs over unused slots, and its result says so.

All other work on the device queues after such a pass, which must be rung or cancelled first.
"""

import itertools
import logging
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.token_tree import TokenTree
from services.engine.batch import BatchArrays
from services.kernels.cuda import pinned
from services.kernels.cuda.kernel import LANES, build
from services.mlx.launching import launch

_log = logging.getLogger(__name__)

TIMEOUT_MS = 30
"""Longest wait: about twice the time in which a drafter answers after a rest."""

_WORDS = 128
"""Words per box."""
_BOXES = 4
"""Number of boxes, used in turn: a pass reads its box while the next one's is written."""
_RUNS, _START, _TOKENS, _POSITIONS, _SEEN = 1, 2, 4, 36, 68
"""Offsets in a box, whose word 0 is the ticket (`doorbell.cuh`)."""
_TICKETS = 1 << 30

_AWAIT = """
__shared__ bool rang;
const unsigned long long address = (unsigned long long)(place[1]) << 32 | place[0];
const volatile int* box = reinterpret_cast<const volatile int*>(address);
if (threadIdx.x == 0) rang = await_ring(box, int(call[0]), TIMEOUT * 1000000ull);
__syncthreads();
const int i = threadIdx.x, first = rang ? box[START] : int(call[1]);
if (i < ROWS) {
  tokens[i] = rang ? box[TOKENS + i] : 0;
  positions[i] = rang ? box[POSITIONS + i] : first;
  bits[i] = rang ? unsigned(box[SEEN + i]) : 1u << i;
}
if (i == 0) {
  start[0] = first;
  rung[0] = rang ? 1 : 0;
}
"""
_SHOW = """
const int slot = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, slots = sizes[0];
if (slot < slots) visible[row * slots + slot] = sees(slot, start[0], sizes[1], bits[row]);
"""
_THREADS = 256
_PAIRS = (2, 4, 8, 16)
"""Sizes of the groups in which a pass's chosen tokens are read."""


class Ticket(NamedTuple):
    """The place of a waiting pass in the queue for the boxes."""

    number: int
    rows: int
    rung: mx.array
    """[1] 1 if the pass was rung."""


class Doorbell:
    """Boxes in host memory that the device reads over the bus.

    Args:
        boxes: [boxes, words] of pinned memory, from `open_doorbell`.
    """

    def __init__(self, boxes: npt.NDArray[np.int32]) -> None:
        self._boxes = boxes
        self._places = [_pair(*pinned.address_of(box)) for box in boxes]
        self._tickets = itertools.cycle(range(1, _TICKETS))

    def await_tokens(self, rows: int, slots: int, spare: int) -> tuple[BatchArrays, Ticket]:
        """Return the rows of a pass that waits for its tokens, known when the bell rings.

        Args:
            rows: of the pass, up to 32: a row's view of the pass is one word.
            slots: of the buffers.
            spare: a slot after all that can be in use by then, with room for the rows.
        """
        number = next(self._tickets)
        place, call = self._places[number % _BOXES], _pair(number, spare)
        names = ("tokens", "start", "positions", "bits", "rung")
        wait = build(("doorbell.cuh",), _AWAIT, ("place", "call"), contiguous=True, outputs=names)
        tokens, start, positions, bits, rung = wait(
            inputs=[place, call],
            template=[("ROWS", rows), ("TIMEOUT", TIMEOUT_MS)],
            grid=(LANES, 1, 1),
            threadgroup=(LANES, 1, 1),
            output_shapes=[(1, rows), (1,), (rows,), (rows,), (1,)],
            output_dtypes=[mx.int32, mx.int32, mx.int32, mx.uint32, mx.int32],
        )
        inputs, outputs = ("start", "bits", "sizes"), ("visible",)
        show = build(("doorbell.cuh",), _SHOW, inputs, contiguous=True, outputs=outputs)
        [visible] = show(
            inputs=[start, bits, _pair(slots, rows)],
            template=[],
            grid=(-(-slots // _THREADS) * _THREADS, rows, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(rows, slots)],
            output_dtypes=[mx.bool_],
        )
        return BatchArrays(tokens, start[0], positions, visible), Ticket(number, rows, rung)

    def launch(self, *arrays: mx.array) -> None:
        """Queue the computation of these arrays."""
        launch(*arrays)

    def report(self, numbers: mx.array) -> Callable[[], npt.NDArray[np.int32]]:
        """Queue the computation of [count] int32 numbers; return them when they are ready."""
        count = numbers.size
        pairs = split_in_pairs(numbers)
        self.launch(*pairs)
        return lambda: np.concatenate([np.array(pair) for pair in pairs])[:count]

    def ring(self, ticket: Ticket, tree: TokenTree, start: int) -> None:
        """Start the pass over this tree, of at most its number of rows, from this slot on."""
        box, rows = self._box(ticket), ticket.rows
        padding = [0] * (rows - len(tree))
        box[_START] = start
        _write(box, _TOKENS, [*tree.tokens, *padding])
        _write(box, _POSITIONS, [start + depth for depth in (*tree.depths, *padding)])
        _write(box, _SEEN, write_bits(tree, rows))
        self._release(ticket, runs=True)

    def call_off(self, ticket: Ticket) -> None:
        """Cancel the pass; the device skips it immediately."""
        self._release(ticket, runs=False)

    def _box(self, ticket: Ticket) -> npt.NDArray[np.int32]:
        box: npt.NDArray[np.int32] = self._boxes[ticket.number % _BOXES]
        return box

    def _release(self, ticket: Ticket, *, runs: bool) -> None:
        box = self._box(ticket)
        box[_RUNS] = runs
        # Last: on the supported processors, stores become visible in program order.
        box[0] = ticket.number


def _write(box: npt.NDArray[np.int32], place: int, words: Sequence[int]) -> None:
    """Write words to a box, several times faster than numpy: the device waits for them."""
    struct.pack_into(f"{len(words)}I", box.data, box.itemsize * place, *words)


def _pair(low: int, high: int) -> mx.array:
    """Return two words: MLX keeps an array this small in host memory, without asking the device."""
    return mx.array(np.array([low, high], np.uint32))


def split_in_pairs(numbers: mx.array) -> list[mx.array]:
    """Split [count] int32, 32 at most, into arrays of two, readable while a pass waits there.

    MLX first moves larger ones to host memory, for which it may have to wait. There are as many as
    4, 8, 16 or 32 numbers need: few kernels serve all counts.
    """
    needed = -(-numbers.size // 2)
    count = next(size for size in _PAIRS if size >= needed)
    names = tuple(f"pair{place}" for place in range(count))
    lines = [f"{name}[i] = numbers[min({2 * at} + i, last)];" for at, name in enumerate(names)]
    body = "const int i = threadIdx.x, last = numbers_shape[0] - 1;\n" + "\n".join(lines)
    split = build(("doorbell.cuh",), body, ("numbers",), contiguous=True, outputs=names)
    return split(
        inputs=[numbers],
        template=[],
        grid=(2, 1, 1),
        threadgroup=(2, 1, 1),
        output_shapes=[(2,)] * count,
        output_dtypes=[mx.int32] * count,
    )


def write_bits(tree: TokenTree, rows: int) -> list[int]:
    """Return the rows of the pass that each row attends to, up to 32; bit 0 is the first.

    Padding sees itself.
    """
    bits = [1]
    for row, parent in enumerate(tree.parents, start=1):
        bits.append(bits[parent] | 1 << row)
    return [*bits, *(1 << row for row in range(len(bits), rows))]


def open_doorbell() -> Doorbell | None:
    """Return a doorbell for the current device; None if unsupported, with a log entry."""
    try:
        memory = pinned.allocate(4 * _WORDS * _BOXES)
    except OSError as error:
        _log.info("no pass is launched before its tokens are known: %s", error)
        return None
    return Doorbell(memory.view(np.int32).reshape(_BOXES, _WORDS))
