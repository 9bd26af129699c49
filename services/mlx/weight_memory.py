"""Memory for weights that every pass reads: in large pages, and from the beginning of a cache line.

A pass reads each weight once. With pages of 4 KB the processor looks up an address for every 64
cache lines, and its prefetching ends with each page.
"""

import contextlib
import mmap
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Element = TypeVar("Element", bound=np.generic)

LINE = 64
"""Bytes of a cache line."""
_LARGE_PAGE = 1 << 21
_PIECE = 16 * _LARGE_PAGE
"""Memory that is taken at once; what is not used of it costs nothing."""


class WeightMemory:
    """Hands out parts of large pieces, which live as long as what lies in them."""

    def __init__(self) -> None:
        self._rest: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        """Of the piece in use, from a multiple of LINE on."""

    def copy(self, array: npt.NDArray[Element]) -> npt.NDArray[Element]:
        """The same array in such memory."""
        room = -(-array.nbytes // LINE) * LINE
        if room > len(self._rest):
            self._rest = _allocate(max(room, _PIECE))
        own, self._rest = self._rest[: array.nbytes], self._rest[room:]
        placed = own.view(array.dtype).reshape(array.shape)
        placed[...] = array
        return placed


def _allocate(size: int) -> npt.NDArray[np.uint8]:
    """So many bytes from the beginning of a large page, in large pages where there are any."""
    memory = mmap.mmap(-1, size + _LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: small ones do
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.ctypes.data % _LARGE_PAGE
    return whole[first : first + size]
