"""Flag of an idle drafter or verifier: four bytes that both processes map.

The other one's kernels read them between two parts of a product (`mlx/cpu/threads.c`), which no
message could be fast enough for. Either process may die and leave them as they are: a core that
is said to be idle is, without its process, and one that is said to be busy is left alone.
"""

import ctypes
import logging
import mmap
import os

_log = logging.getLogger(__name__)

_SIZE = ctypes.sizeof(ctypes.c_int)


class IdleFlag:
    """A file of this kind; raises OSError if it can be neither opened nor made."""

    def __init__(self, path: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)  # the other process may have made it already
            mapped = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self.word = ctypes.c_int.from_buffer(mapped)
        """Where it is in memory, for as long as this exists: 1 or 0."""

    @property
    def is_idle(self) -> bool:
        """True if the last process that wrote said so."""
        return bool(self.word.value)

    @is_idle.setter
    def is_idle(self, idle: bool) -> None:
        self.word.value = int(idle)


def open_idle_flag(path: str) -> IdleFlag | None:
    """The flag in this file; None if there is no path, or no way to share it."""
    if not path:
        return None
    try:
        return IdleFlag(path)
    except OSError as error:
        _log.info("target and drafter share no core within a round: %s", error)
        return None
