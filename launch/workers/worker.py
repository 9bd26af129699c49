"""A helper process: one of our modules, JSON lines in and out, one error sentence at its end."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any, TypeVar

import msgspec

from launch.settings.machine import child_environment, extend_environment, module_command
from protocol.errors import BY_EXIT_CODE, DeadlineExceeded, RuntimeFailure, SsdError
from protocol.process.child import find_error
from protocol.process.closeable import Closeable
from protocol.settings import ChildSettings, Device, Settings, encode_settings

_TICK_S = 0.1
_SHUTDOWN_S = 20.0
_OBJECT = b'{"'
"""Beginning of a message; other lines are printed by libraries."""

M = TypeVar("M")


class JsonWorker(Closeable):
    """One run of one of our modules, in a separate process.

    Args:
        name: its name in errors.
        module: the module, as in `python -m`.
        settings: its one argument.
        device: its device.
        environment: more variables.
        descriptors: file descriptors that it inherits, besides those of its settings.
    """

    def __init__(
        self,
        name: str,
        module: str,
        settings: Settings,
        *,
        device: Device = "",
        environment: Mapping[str, str] | None = None,
        descriptors: tuple[int, ...] = (),
    ) -> None:
        self._name = name
        own_descriptors = settings.descriptors if isinstance(settings, ChildSettings) else ()
        # A file, not a pipe: it is not read continuously, and a full pipe would block the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self._process = subprocess.Popen(
            [*module_command(module), encode_settings(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=(*own_descriptors, *descriptors),
            env={**child_environment(device), **(environment or {})},
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
        self._stopping = False
        self._last = b""
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        # In a thread: Ctrl-C in the middle of a read would lose the start of a line.
        self._reader = Thread(target=self._collect_lines, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _collect_lines(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                if line.startswith(_OBJECT):
                    self._last = line
                    self._lines.put(line)

    def ask(self, question: msgspec.Struct, kind: type[M]) -> M:
        """Return its answer to a question; raise the error that the process died of."""
        self.send(question)
        return self.receive(kind)

    def send(self, question: msgspec.Struct) -> None:
        """Send without waiting; raise the error that the process died of."""
        if self._process.stdin is None:
            raise RuntimeFailure(f"the {self._name} process has no pipes")
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def receive(self, kind: type[M]) -> M:
        """Return its next message; raise the error that the process died of."""
        for message in self.events(kind):
            answer: M = message
            return answer
        raise self._failure()

    def events(self, kind: Any) -> Iterator[Any]:
        """Yield its messages, of a type or a union of types, until it ends.

        May be called again after an interruption.
        """
        decoder = msgspec.json.Decoder(kind)
        while self._reader.is_alive() or not self._lines.empty():
            with contextlib.suppress(Empty):
                yield decoder.decode(self._lines.get(timeout=_TICK_S))

    def result(self, kind: type[M], timeout_s: float | None = None) -> M:
        """Return its last message, once it has ended.

        Raises:
            DeadlineExceeded: it did not end in time.
            SsdError: the error that the process died of.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(
                f"the {self._name} process did not end within {timeout_s:g} s"
            ) from error
        self._reader.join(_SHUTDOWN_S)
        if code != 0 or not self._last:
            raise self._failure()
        return msgspec.json.decode(self._last, type=kind)

    def ask_to_stop(self) -> None:
        """Let it save, or remove, unfinished work, and end."""
        self._stopping = True
        self._process.terminate()

    def _failure(self) -> SsdError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SHUTDOWN_S)
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace")
        return error_of(self._name, self._process.poll(), output)

    def close(self) -> None:
        """End the process if it has not ended; at once if it was asked before."""
        if self._process.poll() is None and not self._stopping:
            self.ask_to_stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SHUTDOWN_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(_SHUTDOWN_S)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # a question that was not read
                self._process.stdin.close()
        self._errors.close()


def run_module(
    name: str,
    module: str,
    *arguments: str,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: tuple[int, ...] = (),
) -> str:
    """Run one of our modules to its end; return its standard output.

    Args:
        name: its name in errors.
        module: the module, as in `python -m`.
        arguments: of the module.
        timeout_s: deadline of its end.
        environment: more variables.
        descriptors: file descriptors that it inherits.

    Raises:
        DeadlineExceeded: it did not end in time.
        SsdError: the error that it died of.
    """
    command = [*module_command(module), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            pass_fds=descriptors,
            env=extend_environment(environment or {}),
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"the {name} did not end within {timeout_s:g} s") from error
    if done.returncode:
        raise error_of(name, done.returncode, done.stderr)
    return done.stdout


def error_of(name: str, code: int | None, output: str) -> SsdError:
    """Return the error that a process died of: its report, its signal, or the end of its output.

    Args:
        name: its name in the message.
        code: its exit code; negative is the signal that ended it, None if it has not ended.
        output: what it wrote to stderr.
    """
    if sentence := find_error(output):
        return BY_EXIT_CODE.get(code or 0, RuntimeFailure)(sentence)
    if code is not None and code < 0:
        return RuntimeFailure(f"the {name} was killed by signal {-code}")
    last = [line for line in output.splitlines() if line.strip()][-1:]
    ending = f"exit code {code}" if code is not None else "no more answers"
    return RuntimeFailure(": ".join([f"the {name} ended with {ending}", *last]))
