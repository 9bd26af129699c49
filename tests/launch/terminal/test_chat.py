"""`ssd chat`, driven in a pseudo-terminal as a person would."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack import DEADLINE_S, leftovers
from tests.support.tiny_models import write_endless_model

pytestmark = pytest.mark.processes

PROMPT = ">> "
# Makes it the controlling terminal, so that Ctrl-C becomes a signal.
_IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self._end, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *command],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, text: str) -> str:
        """What appeared up to this text, which must come before the deadline."""
        end = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            left = end - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            self._read(left)
        before, _, self.seen = self.seen.partition(text)
        return before

    def more(self) -> None:
        """Wait until anything else appears."""
        if not self.seen:
            self._read(DEADLINE_S)
        assert self.seen

    def _read(self, timeout_s: float) -> None:
        if select.select([self._end], [], [], timeout_s)[0]:
            self.seen += os.read(self._end, 65536).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(DEADLINE_S)
        os.close(self._end)


@pytest.fixture
def terminal(run_dir: Path, tmp_path: Path) -> Iterator[Terminal]:
    target, draft = (write_endless_model(tmp_path / name, "llama", seed=1) for name in "td")
    command = [sys.executable, "-m", "launch.cli", "chat", "-m", "100000", "--temp", "1"]
    command += ["--model", str(target), "--draft-model", str(draft), "--seed", "3"]
    # Fixed, or the planner may find that plain decoding is faster here; and the models are the
    # same, so every draft is accepted.
    command += ["--num-draft-tokens", "3"]
    found = Terminal(command)
    yield found
    found.close()
    assert leftovers(run_dir) == []


def test_a_conversation_on_a_terminal(terminal: Terminal) -> None:
    """Questions are answered; Ctrl-C stops an answer and not the program; keys do what h says."""
    terminal.until(PROMPT)
    terminal.type("/stats\n")
    terminal.until("nothing was answered yet")
    terminal.until(PROMPT)
    terminal.type("hello\n")
    terminal.until("hello\r\n")
    terminal.more()
    terminal.type(CTRL_C)
    terminal.until("stopped")
    terminal.until(PROMPT)
    assert terminal.process.poll() is None
    terminal.type("h\n")
    terminal.until("forget the conversation")
    terminal.until(PROMPT)
    terminal.type("/draft\n")
    terminal.until("colours")
    terminal.until(PROMPT)
    terminal.type("more\n")
    terminal.until("\x1b[3")  # green or yellow: drafted in time or not, but accepted
    terminal.type(CTRL_C)
    terminal.until("stopped")
    terminal.until(PROMPT)
    terminal.type("r\n")
    terminal.until("forgotten")
    terminal.until(PROMPT)
    terminal.type(CTRL_C)
    terminal.until("q quits")
    terminal.until(PROMPT)
    terminal.type("q\n")
    assert terminal.process.wait(DEADLINE_S) == 0


def test_a_terminal_that_closes_ends_the_program(terminal: Terminal) -> None:
    """SIGHUP and SIGTERM end it, also in the middle of an answer, with all processes."""
    terminal.until(PROMPT)
    terminal.type("hello\n")
    terminal.until("hello\r\n")
    terminal.more()
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(DEADLINE_S) == 130


def test_the_end_of_the_input_ends_the_program(terminal: Terminal) -> None:
    """Ctrl-D at the prompt."""
    terminal.until(PROMPT)
    terminal.type(CTRL_D)
    assert terminal.process.wait(DEADLINE_S) == 0
