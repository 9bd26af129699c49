"""A process that tells its work as JSON lines: started, listened to, ended."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Generic, TypeVar

import msgspec

from protocol.errors import BY_EXIT_CODE, RuntimeFailure
from protocol.process.child import ERROR_PREFIX
from protocol.process.closeable import Closeable
from protocol.settings import ChildSettings, encode_settings

_LOOK_S = 0.1
_END_S = 20.0

Event = TypeVar("Event")
Last = TypeVar("Last")


class Telling(Closeable, Generic[Event, Last]):
    """One run of a program; an event of kind `last` is its last word."""

    def __init__(
        self,
        program: str,
        settings: ChildSettings,
        decoder: "msgspec.json.Decoder[Event]",
        last: type[Last],
    ) -> None:
        self._program, self._decoder, self._kind = program, decoder, last
        # A file, not a pipe: nobody reads along, and a full pipe would stop the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", program, encode_settings(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=(settings.lifeline,),
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
        self._asked = False
        self._last: Last | None = None
        self._events: SimpleQueue[Event] = SimpleQueue()
        # In a thread: Ctrl-C in the middle of a read would lose the start of a line.
        self._reader = Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                # Other libraries may write lines of their own.
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                    event = self._decoder.decode(line)
                    self._events.put(event)
                    if isinstance(event, self._kind):
                        self._last = event

    def events(self) -> Iterator[Event]:
        """What it says, until it ends; may be called again after an interruption."""
        while self._reader.is_alive() or not self._events.empty():
            with contextlib.suppress(Empty):
                yield self._events.get(timeout=_LOOK_S)

    def ended(self) -> Last:
        """Its last word; raises the error that it died of if there was none."""
        code = self._process.wait()
        self._reader.join(_END_S)
        if code == 0 and self._last is not None:
            return self._last
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        sentences = [line for line in lines if line.startswith(ERROR_PREFIX)]
        if sentences:
            kind = BY_EXIT_CODE.get(code, RuntimeFailure)
            raise kind(sentences[-1].removeprefix(ERROR_PREFIX))
        raise RuntimeFailure(f"{self._program} ended with exit code {code} and no last word")

    def ask_to_stop(self) -> None:
        """Let it save, or remove, what is half-done, and end."""
        self._asked = True
        self._process.terminate()

    def close(self) -> None:
        """End the process if it has not ended; at once if it was asked before."""
        if self._process.poll() is None and not self._asked:
            self.ask_to_stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(_END_S)
        self._errors.close()
