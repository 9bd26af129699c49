"""Questions on a terminal, and the signals that end them."""

import signal
import sys
from collections.abc import Iterator

import pytest

from tests.support.terminal import Terminal, terminal

pytestmark = pytest.mark.processes

_ASK = """
from launch import signals
from launch.terminal.line_editor import LineEditor
signals.install()
editor, count = LineEditor(), 0
while True:
    count += 1
    try:
        print(f"question {count}.", flush=True)
        print(f"said {editor.ask('>> ')}.", flush=True)
    except signals.Terminated:
        print(f"terminated {count}.", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted {count}.", flush=True)
    except EOFError:
        break
"""
_TIMES = 60
CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture(params=["xterm", "dumb"])
def asked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", request.param)
    # Nobody at the other end of this terminal says where its cursor is.
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    with terminal([sys.executable, "-c", _ASK]) as made:
        yield made


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")]
)
def test_a_signal_ends_a_question_whenever_it_comes(
    asked: Terminal, number: signal.Signals, word: str
) -> None:
    """While the editor starts, too."""
    for count in range(1, _TIMES):
        asked.wait_for(f"question {count}.")
        asked.process.send_signal(number)
        asked.seen = asked.wait_for(f"{word} {count}.")


def _await_question(asked: Terminal, count: int) -> None:
    """Wait until its editor reads keys: before, the terminal has them."""
    question = f"question {count}."
    _, _, asked.seen = asked.wait_for(question).partition(question)
    asked.wait_for(">>")


def test_keys_end_a_question(asked: Terminal) -> None:
    _await_question(asked, 1)
    asked.type("hello\\\rworld\r")
    asked.seen = asked.wait_for("said hello", "world.", "question 2.")
    _await_question(asked, 2)
    asked.type(CTRL_C)
    asked.seen = asked.wait_for("interrupted 2.", "question 3.")
    _await_question(asked, 3)
    asked.type(CTRL_D)
    assert asked.end() == 0


_HIDE = """
import select, sys
from launch.terminal.line_editor import LineEditor, typing_hidden
editor = LineEditor()
with typing_hidden():
    print("hidden.", flush=True)
    select.select([sys.stdin], [], [])
    print("typed.", flush=True)
for _ in range(3):
    print(f"said {editor.ask('>> ')}.", flush=True)
"""


def test_lines_that_were_typed_ahead_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is edited: the terminal gives all of them at once."""
    monkeypatch.setenv("TERM", "dumb")
    with terminal([sys.executable, "-c", _HIDE]) as asked:
        asked.wait_for("hidden.")
        asked.type("one\ntwo\nth")
        asked.seen = asked.wait_for("typed.", "said one.", "said two.")
        asked.type("ree\n")
        asked.wait_for("said three.")
        assert asked.end() == 0
