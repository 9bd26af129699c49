"""`ssd chat`, driven in a pseudo-terminal as a person would."""

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack import DEADLINE_S, leftovers
from tests.support.terminal import Terminal
from tests.support.tiny_models import write_endless_model

pytestmark = pytest.mark.processes

PROMPT = ">>"
ENTERED = "\x1b[?2004l"
"""What the editor sends when a line is complete: what follows is the program's."""
_CONTROL = re.compile(r"\x1b(\[[0-9;?]*([a-zA-Z]|$)|[^\[]|$)")
"""A sequence that moves the cursor or sets a mode, also the beginning of one."""
CTRL_C, CTRL_D = "\x03", "\x04"


class Conversation(Terminal):
    """One with `ssd chat`."""

    def until(self, text: str) -> str:
        """What appeared up to this text, which must come before the deadline."""
        end = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            left = end - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            self.read(left)
        before, _, self.seen = self.seen.partition(text)
        return before

    def more(self) -> None:
        """Wait until there is more to read: the answer has begun, or goes on."""
        end, before = time.monotonic() + DEADLINE_S, len(self._words())
        while len(self._words()) <= before:
            left = end - time.monotonic()
            assert left > 0, f"nothing more in {self.seen!r}"
            self.read(left)

    def _words(self) -> str:
        """What a person sees of it."""
        return "".join(_CONTROL.sub("", self.seen).split())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(DEADLINE_S)
        super().close()


@pytest.fixture
def terminal(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Conversation]:
    # Nobody at the other end of this terminal says where its cursor is.
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    target, draft = (write_endless_model(tmp_path / name, "llama", seed=1) for name in "td")
    command = [sys.executable, "-m", "launch.cli", "chat", "-m", "100000", "--temp", "1"]
    command += ["--model", str(target), "--draft-model", str(draft), "--seed", "3"]
    # Fixed, or the planner may find that plain decoding is faster here; and the models are the
    # same, so every draft is accepted.
    command += ["--num-draft-tokens", "3"]
    found = Conversation(command)
    yield found
    found.close()
    assert leftovers(run_dir) == []


def test_a_conversation_on_a_terminal(terminal: Conversation) -> None:
    """Questions are answered; Ctrl-C stops an answer and not the program; commands have slashes."""
    terminal.until("drafted by d (mlx); /help")
    terminal.until(PROMPT)
    terminal.type("/stats\r")
    terminal.until("nothing was answered yet")
    terminal.until(PROMPT)
    terminal.type("h\r")  # a letter is a message like any other
    terminal.until(ENTERED)
    terminal.more()
    terminal.type(CTRL_C)
    terminal.until("stopped")
    terminal.until(PROMPT)
    assert terminal.process.poll() is None
    terminal.type("/help\r")
    terminal.until("forget the conversation")
    terminal.until(PROMPT)
    terminal.type("/nothing\r")
    terminal.until("there is no command /nothing")
    terminal.until(PROMPT)
    terminal.type("/draft\r")
    terminal.until("colours")
    terminal.until(PROMPT)
    terminal.type("more\r")
    terminal.until(ENTERED)
    terminal.until("\x1b[3")  # green or yellow: drafted in time or not, but accepted
    terminal.type(CTRL_C)
    terminal.until("stopped")
    terminal.until(PROMPT)
    terminal.type("/reset\r")
    terminal.until("forgotten")
    terminal.until(PROMPT)
    terminal.type(CTRL_C)
    terminal.until("/quit ends")
    terminal.until(PROMPT)
    terminal.type("/quit\r")
    assert terminal.process.wait(DEADLINE_S) == 0


def test_what_is_typed_ahead_waits_for_the_prompt(terminal: Conversation) -> None:
    """It neither lands in the answer nor is lost."""
    terminal.until(PROMPT)
    terminal.type("hello\r")
    terminal.until(ENTERED)
    terminal.more()
    terminal.type("/nonsuch")
    terminal.more()
    terminal.type(CTRL_C)
    answer = terminal.until("stopped")
    assert "/nonsuch" not in answer
    terminal.until("/nonsuch")
    terminal.type("\r")
    terminal.until("there is no command /nonsuch")


def test_a_terminal_that_closes_ends_the_program(terminal: Conversation) -> None:
    """SIGHUP and SIGTERM end it, also in the middle of an answer, with all processes."""
    terminal.until(PROMPT)
    terminal.type("hello\r")
    terminal.until(ENTERED)
    terminal.more()
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(DEADLINE_S) == 130


def test_the_end_of_the_input_ends_the_program(terminal: Conversation) -> None:
    """Ctrl-D at the prompt."""
    terminal.until(PROMPT)
    terminal.type(CTRL_D)
    assert terminal.process.wait(DEADLINE_S) == 0
