"""A flag for an idle drafter or verifier: four bytes that both processes map.

The other process's kernels read it between two parts of a product (`mlx/cpu/threads.c`), for which
no message would be fast enough. Either process may die and leave the flag unchanged: a core marked
idle is then idle, and a core marked busy is just not used.
"""

import ctypes
import logging
import mmap
import os

_log = logging.getLogger(__name__)

_SIZE = ctypes.sizeof(ctypes.c_int)


class IdleFlag:
    """A memory-mapped flag file; raises OSError if it can be neither opened nor created."""

    def __init__(self, path: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)  # the other process may have created it
            mapped = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self.word = ctypes.c_int.from_buffer(mapped)
        """The shared value, 1 or 0, valid while this object exists."""

    @property
    def is_idle(self) -> bool:
        """True if the process that wrote last is idle."""
        return bool(self.word.value)

    @is_idle.setter
    def is_idle(self, idle: bool) -> None:
        self.word.value = int(idle)


def open_idle_flag(path: str) -> IdleFlag | None:
    """Open the flag in this file; None if there is no path, or the file cannot be shared."""
    if not path:
        return None
    try:
        return IdleFlag(path)
    except OSError as error:
        _log.info("target and drafter share no core within a round: %s", error)
        return None
