"""A doorbell without a device: depths that wait are computed when their result is read."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from services.kernels.cpu.library import view
from services.kernels.cuda import branch_doorbell as words
from services.kernels.cuda.branch_doorbell import (
    BranchDoorbell,
    Branches,
    RoundInputs,
    WaitingBranches,
)
from services.kernels.cuda.doorbell import Ticket


class FakeBranchDoorbell(BranchDoorbell):
    """Writes what it finds in a box into the arrays that the pass was made of.

    Args:
        is_late: of each ring, whether it comes when the pass has given up.
    """

    def __init__(self, is_late: Callable[[], bool] = lambda: False) -> None:
        super().__init__(np.full((4, words._WORDS), -1, np.int32))
        self._is_late = is_late
        self.rung = self.called_off = 0
        self.waiting: tuple[Ticket, WaitingBranches] | None = None
        self._issued: tuple[Ticket, int] | None = None
        self._found: dict[tuple[int, int], mx.array] = {}
        self._late: set[int] = set()

    def issue(self, rows: int, start: int) -> tuple[Ticket, RoundInputs]:
        """See `BranchDoorbell`."""
        assert self.waiting is None, "one round waits at a time"
        ticket, call = super().issue(rows, start)
        self._issued = ticket, start
        return ticket, call

    def await_branches(
        self, call: RoundInputs, rows: int, slots: int, passes: int
    ) -> WaitingBranches:
        """See `BranchDoorbell`."""
        del call
        assert self._issued is not None
        (ticket, start), self._issued = self._issued, None
        assert start + passes * rows <= slots
        own = np.arange(slots)[None] == start + np.arange(rows)[:, None]
        waiting = WaitingBranches(
            mx.zeros(rows, mx.int32),
            mx.full(rows, start, mx.int32),
            mx.array(own),
            mx.zeros((passes, rows, words.RULE_WORDS), mx.uint32),
            mx.zeros((3, rows), mx.int32),
            mx.zeros(1, mx.int32),
        )
        mx.eval(waiting)
        self.waiting = ticket, waiting
        return waiting

    def fork(
        self, waiting: WaitingBranches, found: mx.array, call: RoundInputs
    ) -> tuple[mx.array, mx.array, mx.array]:
        """See `BranchDoorbell`."""
        parents, ranks, excluded = waiting.forks
        seen, ids = waiting.visible, found[0][parents]
        differs = ids != excluded[:, None]
        hits = (mx.cumsum(differs, axis=1) - 1 == ranks[:, None]) & differs
        at = mx.argmax(hits, axis=1, keepdims=True)
        tokens = mx.take_along_axis(ids, at, axis=1)[:, 0].astype(mx.int32)
        rows, slots = seen.shape
        own = mx.arange(slots)[None] == call.start + rows + mx.arange(rows)[:, None]
        return tokens, waiting.positions[parents] + 1, seen[parents] | own

    def send(self, found: mx.array, rung: mx.array, call: RoundInputs, at: int) -> mx.array:
        """See `BranchDoorbell`."""
        del rung, call
        assert self.waiting is not None
        self._found[self.waiting[0].number, at] = found
        return found

    def is_rung(self, ticket: Ticket) -> bool:
        """See `BranchDoorbell`."""
        return ticket.number not in self._late

    def read(self, ticket: Ticket, at: int, shape: tuple[int, ...]) -> Any:
        """See `BranchDoorbell`."""
        assert self.waiting is None or self.waiting[0] is not ticket, "it was not rung for"
        assert int(self._box(ticket)[0]) == ticket.number, "its box was used again"
        assert self.is_rung(ticket)
        found = np.array(self._found[ticket.number, at])
        assert found.shape == shape
        return found

    def launch(self, *arrays: mx.array) -> None:
        """Nothing is computed before the bell is rung."""

    def ring_for(self, ticket: Ticket, branches: Branches) -> None:
        """See `BranchDoorbell`."""
        super().ring_for(ticket, branches)
        waiting = self._end(ticket)
        self.rung += 1
        if self._is_late():
            self._late.add(ticket.number)
        else:
            self._write(ticket, waiting)

    def call_off(self, ticket: Ticket) -> None:
        """See `Doorbell`."""
        super().call_off(ticket)
        self._end(ticket)
        self.called_off += 1

    def _end(self, ticket: Ticket) -> WaitingBranches:
        assert self.waiting is not None, "rung or called off once"
        own, waiting = self.waiting
        assert own is ticket
        self.waiting = None
        return waiting

    def _write(self, ticket: Ticket, waiting: WaitingBranches) -> None:
        """Do what the kernel does."""
        box, rows = self._box(ticket), ticket.rows
        assert box[:2].tolist() == [ticket.number, 1]
        view(waiting.tokens)[:] = box[words._TOKENS :][:rows]
        view(waiting.positions)[:] = box[words._POSITIONS :][:rows]
        rules = box[words._RULES : words._VIEWS].view(np.uint32)
        rules = rules.reshape(words.MOST_PASSES, words.MOST_ROWS, -1)
        view(waiting.rules)[:] = rules[: waiting.rules.shape[0], :rows]
        view(waiting.forks)[:] = box[words._FORKS : words._RULES].reshape(3, -1)[:, :rows]
        seen: Any = view(waiting.visible)
        bits = box[words._VIEWS : words._DONE].view(np.uint8).reshape(words.MOST_ROWS, -1)
        base, views = int(box[2]), np.unpackbits(bits, axis=1, bitorder="little")[:rows]
        seen[:, :base] = True
        behind = seen[:, base : base + words.VIEW]
        behind |= views[:, : behind.shape[1]].astype(np.bool_)
