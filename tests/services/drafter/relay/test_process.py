"""A child of somebody else's: it ends with us, with all that it has started."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from protocol.errors import UsageError
from services.drafter.relay import process
from services.drafter.relay.process import DrafterProcess
from tests.support.stack import DEADLINE_S, eventually, gone

pytestmark = pytest.mark.processes

STUBBORN = "trap '' TERM HUP; sleep 1000 & echo $!; exec 0<&-; wait; sleep 1000"
"""Starts a child, ignores signals and the end of its input."""


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has time to end by itself, and its log to be read, on the busiest machine."""
    monkeypatch.setattr(process, "_SHUTDOWN_S", DEADLINE_S)


def shell(script: str) -> DrafterProcess:
    return DrafterProcess(["/bin/sh", "-c", script])


def first_line(program: DrafterProcess) -> str:
    return os.read(program.reading, 100).decode().strip()


def mine() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.usefixtures("_patient")
def test_a_polite_program_ends_with_its_input() -> None:
    """The end of its input is enough, and nothing of it is left, nor of its guard."""
    before = mine()
    with shell("cat; exit 7") as program:
        assert program.running
        assert mine() > before
    assert "ended with exit code 7" in program.last_words()
    assert mine() == before


def test_a_stubborn_program_is_killed_with_its_children() -> None:
    """Who ignores the end of input and SIGTERM is killed, and so is what it has started."""
    before = mine()
    with shell(STUBBORN) as program:
        child = int(first_line(program))
        assert psutil.pid_exists(child)
    assert "signal 9" in program.last_words() or "closed its pipes" in program.last_words()
    eventually(lambda: gone([child]), "the program's child is gone")
    assert mine() == before


def test_nothing_is_left_if_we_are_killed() -> None:
    """SIGKILL of the process that runs a program ends the program, its children and the guard."""
    code = (
        "import os, sys, time; from services.drafter.relay.process import DrafterProcess\n"
        "p = DrafterProcess(['/bin/sh', '-c', sys.argv[1]])\n"
        "os.write(1, os.read(p.reading, 100)); time.sleep(1000)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, STUBBORN], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    family = [child.pid for child in psutil.Process(holder.pid).children(recursive=True)]
    assert len(family) >= 3
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    eventually(lambda: gone(family), "the program, its child and the guard are gone")


@pytest.mark.usefixtures("_patient")
def test_last_words_are_the_last_line_of_its_log() -> None:
    """A crash is reported with the exit code and what the program said last."""
    with shell("echo one >&2; echo no such model >&2; exit 3") as program:
        words = program.last_words()
    assert words == ("the draft command 'sh' ended with exit code 3; its last words: no such model")


def test_closing_the_pipes_is_not_an_exit() -> None:
    """A program that closes its output and lives on is ended, and that is said."""
    with shell("exec 1>&- 0<&-; sleep 1000") as program:
        assert not os.read(program.reading, 1)
        assert program.last_words() == "the draft command 'sh' closed its pipes"


@pytest.mark.usefixtures("_patient")
def test_its_log_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    """Each line of standard error is a line of our log, with the program's name."""
    with caplog.at_level(logging.INFO), shell("echo loading >&2; echo ready >&2; cat"):
        pass
    assert [record.getMessage() for record in caplog.records] == ["sh: loading", "sh: ready"]


@pytest.mark.usefixtures("_patient")
def test_an_endless_log_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """A program that writes without end fills no disk; how much was left out is said."""
    with (
        caplog.at_level(logging.INFO),
        shell("head -c 3000000 /dev/zero | tr '\\0' x >&2; echo .; cat") as program,
    ):
        first_line(program)
    messages = [record.getMessage() for record in caplog.records]
    assert sum(map(len, messages)) < 300_000
    assert "bytes of its log were dropped" in messages[-1]


@pytest.mark.parametrize("command", ["/no/such/program", "/etc/hostname"])
def test_what_cannot_be_started(command: str) -> None:
    """A program that is missing or not executable is named."""
    assert Path("/etc/hostname").exists()
    with pytest.raises(UsageError, match=command):
        DrafterProcess([command])
