"""Crash journal: a file that names the request in progress and outlives the process.

A client would retry a request that kills the orchestrator (a crash inside a library, a hang that
the supervisor ends) after every restart. The file therefore always names the current request. A new
process reads in it what killed its predecessor, and refuses a request that has caused too many
deaths at the same place. A request that fails by an ordinary exception needs none of this: it ends
alone (`executor`).
"""

import contextlib
import hashlib
import logging
import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from orchestrator.requests.probation import SAME_PLACE
from protocol.messages import Generate
from protocol.process.files import write_atomically
from protocol.transport.codec import encode

_log = logging.getLogger(__name__)

_ENTRY = struct.Struct("<16sI")
"""A digest, and a number of tokens."""
_NOBODY = bytes(_ENTRY.size)
_MOST_REMEMBERED = 1000
_BAN_S = 600.0
"""How long a request that killed a service is refused: clients retry what fails."""


class _Deaths(msgspec.Struct, forbid_unknown_fields=True):
    """The deaths that one request caused."""

    count: int
    length: int
    """Number of its tokens at the last death."""


def fingerprint(message: Generate) -> bytes:
    """Return a digest that ignores the client, the time and the seed."""
    sampling = msgspec.structs.replace(message.sampling, seed=0)
    plain = msgspec.structs.replace(message, request=0, client="", group=0, sampling=sampling)
    return hashlib.blake2b(encode(plain), digest_size=16).digest()


class CrashJournal:
    """The journal of one process; without a folder it records nothing."""

    def __init__(
        self,
        folder: Path | None,
        max_deaths: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_deaths = max_deaths
        self._deaths: dict[str, _Deaths] = {}
        self._page: mmap.mmap | bytearray = bytearray(_ENTRY.size)
        self._clock = clock
        self._banned: dict[bytes, float] = {}
        """Time of the ban by digest."""
        if folder is not None and folder.is_dir():
            self._file = folder / "deaths.json"
            self._open(folder / "at_work")

    def _open(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            self._deaths = msgspec.json.decode(self._file.read_bytes(), type=dict[str, _Deaths])
        try:
            last = path.read_bytes()[: _ENTRY.size] if path.is_file() else b""
            if len(last) == _ENTRY.size and last != _NOBODY:
                self._add_death(last)
            path.write_bytes(_NOBODY)
            with path.open("r+b") as file:
                self._page = mmap.mmap(file.fileno(), _ENTRY.size)
        except (OSError, ValueError) as error:
            _log.warning("deaths of the orchestrator are not remembered: %s", error)

    def _add_death(self, last: bytes) -> None:
        digest, length = _ENTRY.unpack(last)
        name = digest.hex()
        before = self._deaths.pop(name, _Deaths(0, length))
        again = abs(length - before.length) <= SAME_PLACE
        self._deaths[name] = _Deaths(before.count + 1 if again else 1, length)
        _log.error("the orchestrator died while it worked on request %s", name)
        for oldest in list(self._deaths)[:-_MOST_REMEMBERED]:
            del self._deaths[oldest]
        write_atomically(self._file, msgspec.json.encode(self._deaths))

    def is_guilty(self, digest: bytes) -> bool:
        """Return True if the request killed this process or a service too often to be retried."""
        if self._clock() - self._banned.get(digest, -_BAN_S) < _BAN_S:
            return True
        deaths = self._deaths.get(digest.hex())
        return deaths is not None and deaths.count >= self._max_deaths

    def ban(self, digest: bytes) -> None:
        """Refuse a request for a while because a service died of it too often.

        The ban expires: the request may have been present by coincidence.
        """
        self._banned[digest] = self._clock()
        for oldest in list(self._banned)[:-_MOST_REMEMBERED]:
            del self._banned[oldest]

    def enter(self, digest: bytes, length: int) -> bytes:
        """Record the current request at this length; return the token for `leave`."""
        before = bytes(self._page[:])
        self._page[:] = _ENTRY.pack(digest, length)
        return before

    def leave(self, before: bytes) -> None:
        """Restore the previous current request, or none."""
        self._page[:] = before
