"""A doorbell without a device: passes that wait are computed when their result is read."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding.token_tree import TokenTree, read_tree
from services.kernels.cuda.doorbell import Doorbell, LateInputs, write_bits
from services.mlx.array_memory import view


class FakeDoorbell(Doorbell):
    """Writes what is rung for into the arrays that the pass was made of.

    Args:
        is_late: of each ring, whether it comes when the pass has given up.
    """

    def __init__(self, is_late: Callable[[], bool] = lambda: False) -> None:
        super().__init__(np.zeros((4, 128), np.int32))
        self._is_late = is_late
        self.rung = self.called_off = 0
        self.waiting = list[int]()
        self.launched = list[mx.array]()

    def await_tokens(self, rows: int, slots: int, spare: int) -> LateInputs:
        """See `Doorbell`."""
        assert not self.waiting, "one pass waits at a time"
        ticket = self.rung + self.called_off + 1
        self.waiting.append(ticket)
        late = LateInputs(
            mx.zeros((1, rows), mx.int32),
            mx.array(spare),
            mx.full(rows, spare, mx.int32),
            mx.zeros((rows, slots), mx.bool_),
            mx.zeros(1, mx.int32),
            ticket,
        )
        mx.eval(late[:-1])
        self._show(late, spare, write_bits(read_tree([0], []), rows))
        return late

    def launch(self, *arrays: mx.array) -> None:
        """Nothing is computed before the bell is rung."""
        self.launched += arrays

    def report(self, numbers: mx.array) -> Callable[[], npt.NDArray[np.int32]]:
        """See `Doorbell`."""
        assert numbers.size <= 32, "more are not split"
        return lambda: np.array(numbers)

    def ring(self, late: LateInputs, tree: TokenTree, start: int) -> None:
        """See `Doorbell`."""
        self._end(late)
        self.rung += 1
        if self._is_late():
            return
        rows, count = late.tokens.shape[1], len(tree)
        view(late.tokens)[0, :count] = tree.tokens
        place: Any = view(late.start)
        place[...] = start
        view(late.positions)[:] = start
        view(late.positions)[:count] += np.array(tree.depths, np.int32)
        self._show(late, start, write_bits(tree, rows))
        view(late.rung)[0] = 1

    def call_off(self, late: LateInputs) -> None:
        """See `Doorbell`."""
        self._end(late)
        self.called_off += 1

    def _end(self, late: LateInputs) -> None:
        assert self.waiting == [late.ticket], "rung for, or called off, once"
        self.waiting.clear()

    def _show(self, late: LateInputs, start: int, bits: npt.NDArray[np.uint32]) -> None:
        rows, slots = late.visible.shape
        own = np.arange(slots)[None] - start
        seen = (bits[:, None] >> np.clip(own, 0, 31).astype(np.uint32)) & 1 == 1
        view(late.visible)[:] = (own < 0) | ((own < rows) & seen)
