"""A follower's process, local or over ssh, and the two pipes to it.

ssh carries the pipes to another machine, so nothing listens there and the messages are encrypted. A
follower exits at the end of its input.
"""

import contextlib
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from protocol.errors import RuntimeFailure, UsageError
from protocol.messages import Message
from protocol.process.child import ERROR_PREFIX
from protocol.settings import RankHost
from protocol.transport.codec import Decoder
from protocol.transport.pipes import PipeChannel
from services.drafter.relay.process import LogReader
from services.ranks.messages import End, FromFollower

_MODULE = ["-P", "-m", "services.ranks.main"]
_SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
"""No terminal, which would corrupt binary data, and no prompts."""
_END_S = 1.0
_KILL_S = 5.0


def command_for(host: RankHost, python: str) -> Sequence[str]:
    """Return the command that starts a follower on this host."""
    if host.is_local:
        return [sys.executable, *_MODULE]
    return [*_SSH, host.name, shlex.join([python or sys.executable, *_MODULE])]


class RankProcess:
    """One follower as seen by rank 0; raises UsageError if it cannot be started."""

    def __init__(self, rank: int, host: RankHost, python: str) -> None:
        self.rank = rank
        self.host = host
        self.remote_pid = 0
        """Its process id on its own machine, once it has joined."""
        try:
            self._process = subprocess.Popen(
                list(command_for(host, python)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise UsageError(f"{self.name} cannot be started: {error}") from error
        self._log = LogReader(_pipe(self._process.stderr), f"rank {rank}")
        self.reading = _pipe(self._process.stdout).fileno()
        self._way: PipeChannel[FromFollower] = PipeChannel(
            self.reading, _pipe(self._process.stdin).fileno(), Decoder(FromFollower)
        )
        self._sending = threading.Lock()

    @property
    def name(self) -> str:
        """A readable name of the follower."""
        return f"rank {self.rank} on {self.host.name}"

    def send(self, message: Message) -> None:
        """Queue a message; errors as for `PipeChannel.send`."""
        with self._sending:
            self._way.send(message)

    def ready(self, timeout_s: float) -> bool:
        """Return whether a message is waiting; raises StreamEnded if none will come."""
        return self._way.ready(timeout_s)

    def receive(self, timeout_s: float, what: str) -> FromFollower:
        """Return the next message; errors as for `PipeChannel.receive`."""
        return self._way.receive(timeout_s, what)

    def last_words(self) -> str:
        """Return how it ended, and the last line that it or ssh wrote to standard error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._log.join()
        code = self._process.poll()
        if code is None:
            end = "closed its pipes"
        elif code < 0:
            end = f"was killed by signal {-code}"
        else:
            end = f"ended with exit code {code}"
        said = self._log.last.removeprefix(ERROR_PREFIX)
        return f"{self.name} {end}" + (f": {said}" if said else "")

    @property
    def last_line(self) -> str:
        """The last line that it or ssh wrote to standard error."""
        return self._log.last

    def ask_to_end(self) -> None:
        """Send End, and close its input."""
        with contextlib.suppress(RuntimeFailure, OSError):
            self.send(End())
        with contextlib.suppress(OSError):
            _pipe(self._process.stdin).close()

    def end(self, timeout_s: float = _END_S) -> None:
        """Wait for its exit, then kill it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._kill()
        self._log.join()
        _pipe(self._process.stdout).close()

    def _kill(self) -> None:
        if not self.host.is_local and self.remote_pid:
            # A stopped process does not notice the end of its input.
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [*_SSH, self.host.name, f"kill -KILL {self.remote_pid}"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=_KILL_S,
                    check=False,
                )
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise AssertionError("every follower is started with its pipes")
    return pipe
