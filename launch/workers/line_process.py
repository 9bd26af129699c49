"""A child that answers questions: one JSON object a line, on its standard streams."""

import subprocess
import sys
from typing import TypeVar

import msgspec

from launch.settings.machine import child_environment
from protocol.errors import BY_EXIT_CODE, RuntimeFailure
from protocol.process.child import ERROR_PREFIX
from protocol.process.closeable import Closeable
from protocol.settings import ReferenceSettings, encode_settings

A = TypeVar("A")

_LAST_WORDS_S = 5.0


class LineProcess(Closeable):
    """One such child, started by module name; `name` is what errors call it."""

    def __init__(self, name: str, module: str, settings: ReferenceSettings) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, encode_settings(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(settings.device),
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, question: msgspec.Struct, kind: type[A]) -> A:
        """Its answer; raises what the process died of."""
        self.send(question)
        return self.receive(kind)

    def send(self, question: msgspec.Struct) -> None:
        """Ask without waiting."""
        if self._process.stdin is None:
            raise RuntimeFailure(f"the {self._name} process has no pipes")
        try:
            self._process.stdin.write(msgspec.json.encode(question).decode() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def receive(self, kind: type[A]) -> A:
        """The next answer."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise self._failure()
        return msgspec.json.decode(line, type=kind)

    def _failure(self) -> Exception:
        rest = self._process.stderr.read() if self._process.stderr else ""
        lines = [line for line in rest.splitlines() if line.strip()] or ["no reason given"]
        try:
            code = self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            code = RuntimeFailure.exit_code
        kind = BY_EXIT_CODE.get(code, RuntimeFailure)
        return kind(f"the {self._name} process failed: {lines[-1].removeprefix(ERROR_PREFIX)}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
