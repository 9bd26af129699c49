"""Passes over branches that wait on the GPU until the host knows the branches.

Like `doorbell`, for a drafter's round: its rows follow different tokens of the sequence, some of
which may lie in scratch slots. The host also sends the rules by which tokens are chosen, and which
of the tokens chosen after the first pass are rows of the second. What is chosen after each pass is
written to the box.
"""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from services.kernels.cuda import pinned
from services.kernels.cuda.doorbell import BOXES, TIMEOUT_MS, Doorbell, Ticket, to_pair
from services.kernels.cuda.kernel import build
from services.kernels.cuda.sampling.rules import WORDS as RULE_WORDS

_log = logging.getLogger(__name__)

MOST_ROWS = 32
"""Rows of a pass that a box has room for."""
MOST_PASSES = 6
"""Passes that a box has room for."""
VIEW = 512
"""Slots, from the first that not all rows see, of which a box says which row sees them."""
_TOKENS, _POSITIONS, _FORKS, _RULES, _VIEWS = 4, 36, 68, 164, 1316
"""Offsets in a box (`doorbell.cuh`); its third word is the first slot of the views."""
_DONE = _VIEWS + MOST_ROWS * VIEW // 32
_FOUND, _FOUND_WORDS = _DONE + 12, 1024
_WORDS = _FOUND + MOST_PASSES * _FOUND_WORDS
_THREADS = 512
_TEXT = ("doorbell.cuh",)
_TIMEOUT_S = 1.0
"""Longest wait for a pass that was rung for."""

_AWAIT = """
__shared__ int box[DONE];
__shared__ bool rang;
const unsigned long long address = (unsigned long long)(place[1]) << 32 | place[0];
const volatile int* sent = reinterpret_cast<const volatile int*>(address);
if (threadIdx.x == 0) rang = await_ring(sent, int(call[0]), TIMEOUT * 1000000ull);
__syncthreads();
for (int i = threadIdx.x; i < DONE; i += blockDim.x) box[i] = rang ? sent[i] : 0;
__syncthreads();
const int first = call[1];
for (int i = threadIdx.x; i < ROWS; i += blockDim.x) {
  tokens[i] = box[TOKENS + i];
  positions[i] = rang ? box[POSITIONS + i] : first;
  for (int part = 0; part < 3; part++) forks[part * ROWS + i] = box[FORKS + part * 32 + i];
}
for (int i = threadIdx.x; i < PASSES * ROWS * RULE_WORDS; i += blockDim.x) {
  const int pass = i / (ROWS * RULE_WORDS), word = i % (ROWS * RULE_WORDS);
  rules[i] = box[RULES + pass * 32 * RULE_WORDS + word];
}
for (int i = threadIdx.x; i < ROWS * SLOTS; i += blockDim.x)
  visible[i] = sees_branch(i % SLOTS, i / SLOTS, first, rang, box);
if (threadIdx.x == 0) rung[0] = rang ? 1 : 0;
"""
_FORK = """
const int slot = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, slots = seen_shape[1];
const int parent = forks[row], rows = gridDim.y;
if (slot < slots)
  visible[row * slots + slot] = seen[parent * slots + slot] || slot == int(call[1]) + rows + row;
if (slot == 0) {
  positions[row] = before[parent] + 1;
  tokens[row] = pick_guess(found + parent * WIDTH, WIDTH, forks[rows + row], forks[2 * rows + row]);
}
"""
_SEND = """
const unsigned long long address = (unsigned long long)(place[1]) << 32 | place[0];
const int ticket = rung[0] ? int(call[0]) : -int(call[0]);
send_found(found, found_shape[0] * found_shape[1] * found_shape[2], PASS, ticket,
           reinterpret_cast<int*>(address));
if (threadIdx.x == 0) sent[0] = 1;
"""


class RoundInputs(NamedTuple):
    """The inputs of the kernels of a round, which tell them their box."""

    place: mx.array
    call: mx.array
    start: mx.array
    """[] int32, the slot of the first pass's first row."""


class WaitingBranches(NamedTuple):
    """The rows of a pass that waits, as they will be once the bell is rung."""

    tokens: mx.array
    """[rows] int32."""
    positions: mx.array
    """[rows] int32."""
    visible: mx.array
    """[rows, slots]."""
    rules: mx.array
    """[passes, rows, WORDS], see `sampling.rules`."""
    forks: mx.array
    """[3, rows] int32: see `Branches`."""
    rung: mx.array
    """[1] 1 if the bell was rung."""


class Branches(NamedTuple):
    """The rows of a pass, at most as many as it has, and of those after it."""

    tokens: Sequence[int]
    positions: npt.NDArray[np.int64]
    """[rows]."""
    base: int
    """All see the slots before this one."""
    views: npt.NDArray[np.bool_]
    """[rows, VIEW] which slots each sees from there on, apart from its own."""
    forks: npt.NDArray[np.int64]
    """[3, rows of the second pass]: the row that each follows, the rank of its token among the
    guesses after that, and a token that does not count there."""
    rules: Sequence[npt.NDArray[np.uint32]]
    """[rows, WORDS] for each pass."""


class BranchDoorbell(Doorbell):
    """Boxes in host memory, from `open_branch_doorbell`."""

    def issue(self, rows: int, start: int) -> tuple[Ticket, RoundInputs]:
        """Return a ticket for a round whose first row goes to this slot."""
        number = next(self._tickets)
        place = self._places[number % BOXES]
        call = RoundInputs(place, to_pair(number, start), mx.array(start, mx.int32))
        return Ticket(number, rows, call.call), call

    def await_branches(
        self, call: RoundInputs, rows: int, slots: int, passes: int
    ) -> WaitingBranches:
        """Return the rows of a pass that waits for its branches.

        Args:
            call: its inputs.
            rows: of a pass, up to MOST_ROWS.
            slots: of the buffers.
            passes: of the round, up to MOST_PASSES.
        """
        names, inputs = (
            ("tokens", "positions", "visible", "rules", "forks", "rung"),
            RoundInputs._fields,
        )
        wait = build(_TEXT, _AWAIT, inputs[:2], contiguous=True, outputs=names)
        numbers, rules = mx.int32, (passes, rows, RULE_WORDS)
        sizes = [("ROWS", rows), ("SLOTS", slots), ("PASSES", passes), ("TIMEOUT", TIMEOUT_MS)]
        outputs = wait(
            inputs=call[:2],
            template=sizes,
            grid=(_THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(rows,), (rows,), (rows, slots), rules, (3, rows), (1,)],
            output_dtypes=[numbers, numbers, mx.bool_, mx.uint32, numbers, numbers],
        )
        return WaitingBranches(*outputs)

    def fork(
        self, waiting: WaitingBranches, found: mx.array, call: RoundInputs
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return the tokens, the positions and the visible slots of the second pass.

        Args:
            waiting: the rows of the first.
            found: [2, rows, width] the guesses after each.
            call: its inputs.
        """
        rows, slots = waiting.visible.shape
        names, inputs = ("tokens", "positions", "visible"), ("found", "before", "seen")
        branch = build(_TEXT, _FORK, (*inputs, "forks", "call"), contiguous=True, outputs=names)
        tokens, positions, visible = branch(
            inputs=[found, waiting.positions, waiting.visible, waiting.forks, call.call],
            template=[("WIDTH", found.shape[2])],
            grid=(-(-slots // _THREADS) * _THREADS, rows, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(rows,), (rows,), (rows, slots)],
            output_dtypes=[mx.int32, mx.int32, mx.bool_],
        )
        return tokens, positions, visible

    def send(self, found: mx.array, rung: mx.array, call: RoundInputs, at: int) -> mx.array:
        """Send [2, rows, width] guesses to the host; return [1], computed once they are there."""
        inputs = ("found", "rung", "place", "call")
        tell = build(_TEXT, _SEND, inputs, contiguous=True, outputs=("sent",))
        [sent] = tell(
            inputs=[found, rung, *call[:2]],
            template=[("PASS", at)],
            grid=(_THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )
        return sent

    def ring_for(self, ticket: Ticket, branches: Branches) -> None:
        """Start the round over these branches."""
        box, count = self._box(ticket), len(branches.tokens)
        box[2:_FOUND] = 0
        box[2] = branches.base
        box[_TOKENS : _TOKENS + count] = branches.tokens
        box[_POSITIONS : _POSITIONS + count] = branches.positions
        forks = box[_FORKS:_RULES].reshape(3, MOST_ROWS)
        forks[:, : branches.forks.shape[1]] = branches.forks
        rules = box[_RULES:_VIEWS].reshape(MOST_PASSES, MOST_ROWS, RULE_WORDS).view(np.uint32)
        for own, given in zip(rules, branches.rules, strict=False):
            own[: len(given)] = given
        words = np.packbits(branches.views, axis=1, bitorder="little").view(np.int32).ravel()
        box[_VIEWS : _VIEWS + len(words)] = words
        self._release(ticket, runs=True)

    def is_rung(self, ticket: Ticket) -> bool:
        """Return False if a round that was rung for had given up; waits for its first pass."""
        return self._await_pass(ticket, 0) > 0

    def read(self, ticket: Ticket, at: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Return what was found after a pass; waits.

        Raises:
            RuntimeError: the round had given up, or its box has been used for another one.
            TimeoutError: the device does not answer.
        """
        if self._await_pass(ticket, at) < 0:
            raise RuntimeError("a round that was rung for too late was read")
        start = _FOUND + at * _FOUND_WORDS
        words = self._box(ticket)[start : start + int(np.prod(shape))]
        return words.view(np.float32).reshape(shape).copy()

    def _await_pass(self, ticket: Ticket, at: int) -> int:
        """Wait for a pass; return the ticket's number, negative if it was not rung for."""
        box, ends = self._box(ticket), time.monotonic() + _TIMEOUT_S
        while abs(done := int(box[_DONE + at])) != ticket.number:
            if int(box[0]) != ticket.number:
                raise RuntimeError("guesses of a round were read after their memory was reused")
            if time.monotonic() > ends:
                raise TimeoutError(f"a pass of the drafter took more than {_TIMEOUT_S:g} s")
        return done


def open_branch_doorbell() -> BranchDoorbell | None:
    """Return a doorbell for the current device; None if unsupported, with a log entry."""
    try:
        memory = pinned.allocate(4 * _WORDS * BOXES)
    except OSError as error:
        _log.info("no round is launched before its branches are known: %s", error)
        return None
    return BranchDoorbell(memory.view(np.int32).reshape(BOXES, _WORDS))
