"""A third-party program as a child process: its pipes, its log, and its reliable termination.

Its processes form their own group. A guard, a shell that holds one end of a pipe, kills that group
when this process ends in any way.
"""

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

import psutil

from protocol.errors import UsageError
from protocol.process.closeable import Closeable
from protocol.process.deadline import Deadline

_log = logging.getLogger(__name__)

_SHUTDOWN_S = 0.4
"""Time the program gets to exit after the end of its input, and again after SIGTERM."""
_TICK_S = 0.01

_LOG_READ_BYTES = 16 * 1024
_LOG_BYTES = 256 * 1024
_LOG_WINDOW_S = 60.0

# $1 is the group. `read` returns when the other end of the pipe has been closed.
_GUARD = 'read -r _; kill -s TERM -- "-$1" && sleep 0.3 && kill -s KILL -- "-$1"'


class DrafterProcess(Closeable):
    """A running program; raises UsageError if it cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        self.name = Path(command[0]).name
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"the draft command cannot be started: {error}") from error
        self._seen = psutil.Process(self._process.pid)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "ssd-guard", str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._closed = False
        self._log = LogReader(_pipe(self._process.stderr), self.name)

    @property
    def reading(self) -> int:
        """File descriptor of its standard output."""
        return _pipe(self._process.stdout).fileno()

    @property
    def writing(self) -> int:
        """File descriptor of its standard input."""
        return _pipe(self._process.stdin).fileno()

    @property
    def running(self) -> bool:
        """True if it has not exited; it is not reaped, so that its group keeps its number."""
        return not self._closed and self._seen.status() != psutil.STATUS_ZOMBIE

    def close(self) -> None:
        """End it, its group and the guard: its input ends, then SIGTERM, then SIGKILL."""
        if self._closed:
            return
        with contextlib.suppress(OSError):
            _pipe(self._process.stdin).close()
        if not self._ends():
            self._signal(signal.SIGTERM)
            self._ends()
        self._signal(signal.SIGKILL)  # also its own children
        self._closed = True
        self._process.wait()
        self._guard.kill()
        self._guard.wait()
        for pipe in (self._guard.stdin, self._process.stdout):
            _pipe(pipe).close()
        self._log.join()

    def last_words(self) -> str:
        """Return how it ended, and its last line on standard error; end it if necessary."""
        by_itself = self._ends()
        self.close()
        code = self._process.returncode
        end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        end = end if by_itself else "closed its pipes"
        said = f"; its last words: {self._log.last}" if self._log.last else ""
        return f"the draft command {self.name!r} {end}{said}"

    def _ends(self) -> bool:
        deadline = Deadline(_SHUTDOWN_S)
        while self.running and not deadline.passed:
            time.sleep(_TICK_S)
        return not self.running

    def _signal(self, number: int) -> None:
        # A group is empty once its only member has exited.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def run_program(command: Sequence[str]) -> Iterator[DrafterProcess]:
    """Run a program that ends with this process, also by SIGTERM; errors as in `DrafterProcess`."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    with DrafterProcess(command) as program:
        try:
            yield program
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # already ending


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise AssertionError("every program is started with its pipes")
    return pipe


class LogReader:
    """Passes a program's standard error to our log, line by line, up to a limit."""

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        self._pipe = pipe
        self._name = name
        self.last = ""
        """The last nonempty line."""
        self._left = _LOG_BYTES
        self._left_out = 0
        self._window = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"log of {name}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the rest, but not if another process holds the other end open."""
        self._thread.join(_SHUTDOWN_S)

    def _run(self) -> None:
        descriptor = self._pipe.fileno()
        with self._pipe:
            while data := os.read(descriptor, _LOG_READ_BYTES):
                self._take(data)
        self._say_what_was_left_out()

    def _take(self, data: bytes) -> None:
        now = time.monotonic()
        if now - self._window > _LOG_WINDOW_S:
            self._say_what_was_left_out()
            self._window, self._left = now, _LOG_BYTES
        lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
        self.last = lines[-1] if lines else self.last
        if self._left < len(data):
            self._left_out += len(data)
            time.sleep(_TICK_S)  # a program that writes endlessly can wait
            return
        self._left -= len(data)
        for line in lines:
            _log.info("%s: %s", self._name, line)

    def _say_what_was_left_out(self) -> None:
        if self._left_out:
            _log.warning("%s: %d bytes of its log were dropped", self._name, self._left_out)
            self._left_out = 0
