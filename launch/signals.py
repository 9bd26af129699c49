"""Signals: the first ends us in an orderly way, another one at once. Neither leaves anything."""

import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN_S = 0.01
"""Until a signal is raised again that nobody could catch."""
_KNOCK_S, _KNOCKS = 0.05, 20
"""Between two interruptions of a main thread that has not heard a signal, and their number."""


class Terminated(KeyboardInterrupt):
    """Somebody wants the program to end: SIGTERM, or its terminal is gone."""


_second_signal: list[Callable[[], None]] = []
_deferred: list[Callable[[type[KeyboardInterrupt]], None]] = []
_lost: list[type[BaseException]] = []


class _Alarm:
    """Lets the main thread hear a signal that comes while it waits for something else.

    Python looks at signals before it waits, and a wait ends for those that come in it. One that
    comes between that look and the wait, or that the system gives to another thread, would be heard
    behind the wait only. A thread learns of each signal at once, and interrupts the main thread
    until it has been heard.
    """

    def __init__(self) -> None:
        self._mouth: socket.socket | None = None
        """Where signals are written; None until it is started."""
        self._heard_at = 0.0

    def start(self) -> None:
        """To be called in the main thread; once is enough."""
        if self._mouth is not None:
            return
        ears, self._mouth = socket.socketpair()
        self._mouth.settimeout(0.0)
        signal.signal(signal.SIGURG, _on_knock)
        self.listen()
        threading.Thread(target=self._run, args=(ears,), name="signals", daemon=True).start()

    def listen(self) -> None:
        """Learn of signals; to be called again after an event loop, which takes our place."""
        if self._mouth is not None:
            signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)

    def on_heard(self) -> None:
        """The main thread handles a signal."""
        self._heard_at = time.monotonic()

    def _run(self, ears: socket.socket) -> None:
        main = threading.main_thread().ident
        while numbers := ears.recv(64):
            arrived = time.monotonic()
            for _ in range(_KNOCKS if set(numbers) - {signal.SIGURG} else 0):
                time.sleep(_KNOCK_S)
                if main is None or self._heard_at > arrived - _KNOCK_S:
                    break
                signal.pthread_kill(main, signal.SIGURG)


_alarm = _Alarm()


@contextlib.contextmanager
def on_second_signal(kill: Callable[[], None]) -> Iterator[None]:
    """Inside, another signal calls `kill` instead of breaking off the orderly end.

    Only in the main thread, which handles signals: what other threads end is a part of the
    program's work.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _second_signal.append(kill)
    try:
        yield
    finally:
        _second_signal.remove(kill)


@contextlib.contextmanager
def defer(notify: Callable[[], None]) -> Iterator[None]:
    """Inside, a signal calls `notify`, and is raised at the end.

    For what an exception in any of its instructions may leave stuck, as an event loop; in the main
    thread.
    """
    arrived: list[type[KeyboardInterrupt]] = []

    def note(kind: type[KeyboardInterrupt]) -> None:
        arrived.append(kind)
        notify()

    _deferred.append(note)
    try:
        yield
    finally:
        _deferred.remove(note)
        _alarm.listen()
        if arrived:
            raise Terminated if Terminated in arrived else KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    _alarm.on_heard()
    kind = KeyboardInterrupt if number == signal.SIGINT else Terminated
    if _deferred:
        _deferred[-1](kind)
    elif not _second_signal:
        raise kind
    for kill in list(_second_signal):
        kill()


def _raise_again(unraisable: "UnraisableHookArgs") -> None:
    """A signal may come during a finaliser, where exceptions are ignored."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _lost.append(type(unraisable.exc_value))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        sys.__unraisablehook__(unraisable)


def _on_alarm(number: int, frame: FrameType | None) -> None:
    lost = Terminated if Terminated in _lost else KeyboardInterrupt
    _lost.clear()
    _interrupt(signal.SIGINT if lost is KeyboardInterrupt else number, frame)


def _on_knock(number: int, frame: FrameType | None) -> None:
    """It has ended a system call: Python looks at signals then."""


def install() -> None:
    """SIGINT, SIGTERM and SIGHUP stop this process alike: through its finally clauses."""
    _alarm.start()
    sys.unraisablehook = _raise_again
    signal.signal(signal.SIGALRM, _on_alarm)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
