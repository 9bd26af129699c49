"""A program on a terminal of its own, watched and typed at by a test."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

from tests.support.stack import DEADLINE_S

# Makes it the controlling terminal, so that Ctrl-C becomes a signal.
_IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """The other end of the program's terminal, 30 rows of 120 columns."""

    def __init__(self, command: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        self.seen = ""

    def wait_for(self, *words: str) -> str:
        """Everything that was printed since the last call, once all these words are in it."""
        end = time.monotonic() + DEADLINE_S
        while not all(word in self.seen for word in words):
            if time.monotonic() > end:
                raise AssertionError(f"{words} did not all come:\n{self.seen}")
            self.read(1.0)
        seen, self.seen = self.seen, ""
        return seen

    def read(self, timeout_s: float) -> None:
        """See what it prints next, if that comes in time."""
        if select.select([self._ours], [], [], timeout_s)[0]:
            self.seen += os.read(self._ours, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._ours, text.encode())

    def end(self) -> int:
        """Its exit code, once it has ended; what it still prints is read."""
        end = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < end:
            self.read(0.1)
        return self.process.wait(1.0)

    def settings(self) -> list[object]:
        """How the terminal is set now."""
        return termios.tcgetattr(self.theirs)

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._ours)
        os.close(self.theirs)


@contextlib.contextmanager
def terminal(command: list[str]) -> Iterator[Terminal]:
    """Run a program on a terminal; it is ended with the block."""
    with contextlib.closing(Terminal(command)) as made:
        yield made
