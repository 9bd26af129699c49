"""Rows of a pass's results that the device writes to host memory, on CUDA.

To read an array MLX allocates memory that both can access, copies it there, and waits: 0.2 ms. The
memory is reused for the next pass's arrays, which the device then reads over the bus; and work
already queued on the device has to finish first. Here a kernel of the pass writes the rows to a
box, where they are available when the pass ends.
"""

import functools
import logging
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from services.kernels.cuda import pinned
from services.kernels.cuda.kernel import build
from services.mlx.loader import compute_unit
from services.mlx.selftest import is_right

_log = logging.getLogger(__name__)

_TYPES = {mx.float16: np.float16, mx.float32: np.float32}
_MOST_ROWS = 32
"""Largest pass, in rows, whose rows are sent."""
_BOXES = 8
"""Number of boxes, used in turn: more than the passes until a pass's rows are last read."""
_THREADS, _MOST_BLOCKS = 256, 32

_BODY = """
const long words = long(rows_shape[0]) * rows_shape[1] * sizeof(T) / 4;
const unsigned long long address = (unsigned long long)(place[1]) << 32 | place[0];
const long thread = long(blockIdx.x) * blockDim.x + threadIdx.x;
send_words(reinterpret_cast<const unsigned*>(rows), words, thread, long(gridDim.x) * blockDim.x,
           reinterpret_cast<unsigned*>(address));
__threadfence_system();
if (thread == 0) sent[0] = 1;
"""


class SentRows:
    """Rows in transit to the host; converting to numpy waits for them."""

    def __init__(self, boxes: "HostRows", number: int, rows: npt.NDArray[Any], sent: mx.array):
        self._boxes, self._number, self._rows = boxes, number, rows
        self.sent = sent
        """[1], computed once the rows are there."""

    def __getitem__(self, rows: slice) -> "SentRows":
        return SentRows(self._boxes, self._number, self._rows[rows], self.sent)

    def __len__(self) -> int:
        return len(self._rows)

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> npt.NDArray[Any]:
        mx.eval(self.sent)  # nothing else of the pass may have been evaluated
        if self._boxes.count - self._number > _BOXES:
            raise RuntimeError("rows of a pass were read after their memory was reused")
        return np.array(self._rows, dtype, copy=copy)


ReadRows = mx.array | SentRows
"""[rows, width], lazy."""


class HostRows:
    """Boxes for the rows of the last passes.

    Args:
        boxes: [boxes, bytes] that the device can write to.
        width: numbers per row.
        dtype: of the rows.
    """

    def __init__(self, boxes: npt.NDArray[np.uint8], width: int, dtype: mx.Dtype) -> None:
        self._boxes, self._width, self._dtype = boxes, width, dtype
        self.count = 0
        """Number of passes whose rows were sent."""

    def send(self, rows: mx.array) -> ReadRows:
        """Send [rows, width] to the host; return the array itself if unsupported."""
        if len(rows) > _MOST_ROWS or rows.shape[1] != self._width or rows.dtype != self._dtype:
            return rows
        number, self.count = self.count, self.count + 1
        box = self._boxes[number % len(self._boxes)][: rows.nbytes]
        held = box.view(_TYPES[self._dtype]).reshape(rows.shape)
        return SentRows(self, number, held, _launch(rows, box))


def _launch(rows: mx.array, box: npt.NDArray[np.uint8]) -> mx.array:
    make = build(("host_rows.cuh",), _BODY, ("rows", "place"), contiguous=True, outputs=("sent",))
    blocks = min(_MOST_BLOCKS, -(-rows.nbytes // (4 * _THREADS)))
    [sent] = make(
        # Two words: MLX keeps an array this small in host memory, without asking the device.
        inputs=[rows, mx.array(np.array(pinned.address_of(box), np.uint32))],
        template=[("T", rows.dtype)],
        grid=(blocks * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return sent


def pending(rows: ReadRows) -> mx.array:
    """Return an array that is computed once the rows are sent."""
    return rows.sent if isinstance(rows, SentRows) else rows


@functools.cache
def open_host_rows(width: int, dtype: mx.Dtype) -> HostRows | None:
    """Return the shared boxes for such rows; None if unsupported, for a reason that is logged."""
    size = width * dtype.size
    if compute_unit() != "cuda" or dtype not in _TYPES or size % 4:
        return None
    try:
        memory = pinned.allocate(_BOXES * _MOST_ROWS * size)
    except OSError as error:
        _log.warning("states that are read of the target are copied: %s", error)
        return None
    boxes = HostRows(memory.reshape(_BOXES, -1), width, dtype)
    rows = mx.random.normal((3, width)).astype(dtype)
    sent = partial(_send_and_read, boxes)
    return boxes if is_right("rows in host memory", "bits", mx.array, sent, [(rows,)]) else None


def _send_and_read(boxes: HostRows, rows: mx.array) -> mx.array:
    return mx.array(np.array(boxes.send(rows)))
