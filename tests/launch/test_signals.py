"""Signals end a program, wherever they find it."""

import subprocess
import sys

import pytest

from tests.support.stack import DEADLINE_S

_BEGIN = """
import os, signal
from launch import signals
signals.install()

def send(number):
    os.kill(os.getpid(), number)
"""
_FINALISER = """
class Last:
    def __del__(self):
        send({number})
        print("not reached")

try:
    last = Last()
    del last
    while True:
        signal.pause()
except {expected}:
    print("ended")
"""
_DEFERRED = """
notes = []
try:
    with signals.defer(lambda: notes.append("told")):
        for number in ({numbers}):
            send(number)
        notes.append("went on")
except signals.Terminated:
    notes.append("terminated")
except KeyboardInterrupt:
    notes.append("interrupted")
try:
    send(signal.SIGINT)
except KeyboardInterrupt:
    notes.append("at once")
print(*notes, sep=", ")
"""

_WAITING = """
import sys, threading

def give():
    main, inside = threading.main_thread().ident, {{}}
    while inside.get("self") is not never._cond or "waiter" not in inside:
        inside = dict(sys._current_frames()[main].f_locals)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

never = threading.Event()
try:
    {before}
    threading.Thread(target=give, daemon=True).start()
    never.wait({deadline})
    print("not heard")
except signals.Terminated:
    print("ended")
"""
_LOOP = """
    import asyncio

    async def mind():
        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, print)

    with signals.defer(print):
        asyncio.run(mind())
"""


def _run(text: str) -> str:
    """What a program prints."""
    command = [sys.executable, "-c", _BEGIN + text]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE_S, text=True)
    assert not ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("number", "expected"),
    [("signal.SIGTERM", "signals.Terminated"), ("signal.SIGINT", "KeyboardInterrupt")],
)
def test_a_signal_during_a_finaliser_is_not_lost(number: str, expected: str) -> None:
    assert _run(_FINALISER.format(number=number, expected=expected)) == "ended\n"


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ("signal.SIGINT,", "told, went on, interrupted, at once\n"),
        ("signal.SIGHUP,", "told, went on, terminated, at once\n"),
        ("signal.SIGTERM, signal.SIGINT", "told, told, went on, terminated, at once\n"),
        ("", "went on, at once\n"),
    ],
)
def test_a_signal_may_be_put_off(numbers: str, said: str) -> None:
    assert _run(_DEFERRED.format(numbers=numbers)) == said


@pytest.mark.parametrize("before", ["pass", _LOOP.strip()], ids=["at first", "after a loop"])
def test_a_signal_that_does_not_end_a_wait_is_heard(before: str) -> None:
    """The system may give it to another thread, and it may come just before the wait."""
    text = _BEGIN + _WAITING.format(before=before, deadline=DEADLINE_S)
    command = [sys.executable, "-c", text]
    ran = subprocess.run(
        command, capture_output=True, timeout=DEADLINE_S / 2, text=True, check=False
    )
    assert (ran.stdout, ran.stderr) == ("ended\n", "")
