"""A doorbell without a device: passes that wait are computed when their result is read."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.token_tree import TokenTree, read_tree
from services.engine.batch import BatchArrays
from services.kernels.cpu.library import view
from services.kernels.cuda.doorbell import Doorbell, Ticket, write_bits


class FakeDoorbell(Doorbell):
    """Writes what is rung for into the arrays that the pass was made of.

    Args:
        is_late: of each ring, whether it comes when the pass has given up.
    """

    def __init__(self, is_late: Callable[[], bool] = lambda: False) -> None:
        super().__init__(np.zeros((4, 128), np.int32))
        self._is_late = is_late
        self.rung = self.called_off = 0
        self.waiting: tuple[Ticket, BatchArrays] | None = None

    def await_tokens(self, rows: int, slots: int, spare: int) -> tuple[BatchArrays, Ticket]:
        """See `Doorbell`."""
        assert self.waiting is None, "one pass waits at a time"
        ticket = Ticket(self.rung + self.called_off + 1, rows, mx.zeros(1, mx.int32))
        batch = BatchArrays(
            mx.zeros((1, rows), mx.int32),
            mx.array(spare),
            mx.full(rows, spare, mx.int32),
            mx.zeros((rows, slots), mx.bool_),
        )
        mx.eval(batch.arrays, ticket.rung)
        self.waiting = ticket, batch
        self._show(batch, spare, write_bits(read_tree([0], []), rows))
        return batch, ticket

    def launch(self, *arrays: mx.array) -> None:
        """Nothing is computed before the bell is rung."""

    def report(self, numbers: mx.array) -> Callable[[], npt.NDArray[np.int32]]:
        """See `Doorbell`."""
        assert numbers.size <= 32, "more are not split"
        return lambda: np.array(numbers)

    def ring(self, ticket: Ticket, tree: TokenTree, start: int) -> None:
        """See `Doorbell`."""
        batch = self._end(ticket)
        self.rung += 1
        if self._is_late():
            return
        count = len(tree)
        view(batch.tokens)[0, :count] = tree.tokens
        place: Any = view(batch.start)
        place[...] = start
        view(batch.positions)[:] = start
        view(batch.positions)[:count] += np.array(tree.depths, np.int32)
        self._show(batch, start, write_bits(tree, ticket.rows))
        view(ticket.rung)[0] = 1

    def call_off(self, ticket: Ticket) -> None:
        """See `Doorbell`."""
        self._end(ticket)
        self.called_off += 1

    def _end(self, ticket: Ticket) -> BatchArrays:
        assert self.waiting is not None, "rung or called off once"
        assert self.waiting[0] is ticket
        batch, self.waiting = self.waiting[1], None
        return batch

    def _show(self, batch: BatchArrays, start: int, bits: list[int]) -> None:
        assert batch.visible is not None
        rows, slots = batch.visible.shape
        own = np.arange(slots)[None] - start
        seen = (
            np.array(bits, np.uint32)[:, None] >> np.clip(own, 0, 31).astype(np.uint32)
        ) & 1 == 1
        view(batch.visible)[:] = (own < 0) | ((own < rows) & seen)
