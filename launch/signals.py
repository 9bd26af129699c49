"""Signals: the first one causes an orderly shutdown, a second one kills. Neither leaves
anything.
"""

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
"""Delay before a signal is raised again that could not be handled."""
_KNOCK_S, _KNOCKS = 0.05, 20
"""Interval between interruptions of a main thread that has not handled a signal, and their
number.
"""


class Terminated(KeyboardInterrupt):
    """The program is to end: SIGTERM, or its terminal is gone."""


_second_signal: list[Callable[[], None]] = []
_deferred: list[Callable[[type[KeyboardInterrupt]], None]] = []
_lost: list[type[BaseException]] = []


class _Alarm:
    """Wakes the main thread for a signal that arrives while it waits.

    Python checks signals before it waits, and a wait ends for signals during it. A signal between
    that check and the wait, or one that the system delivers to another thread, would be handled
    only after the wait. A thread learns of each signal at once, and interrupts the main thread
    until it is handled.
    """

    def __init__(self) -> None:
        self._mouth: socket.socket | None = None
        """Socket that signals are written to; None until it is started."""
        self._heard_at = 0.0

    def start(self) -> None:
        """Start; to be called in the main thread. Once is enough."""
        if self._mouth is not None:
            return
        ears, self._mouth = socket.socketpair()
        self._mouth.settimeout(0.0)
        signal.signal(signal.SIGURG, _on_knock)
        self.listen()
        threading.Thread(target=self._run, args=(ears,), name="signals", daemon=True).start()

    def listen(self) -> None:
        """Register for signals; to be repeated after an event loop, which replaces the
        registration.
        """
        if self._mouth is not None:
            signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)

    def on_heard(self) -> None:
        """Record that the main thread handles a signal."""
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
    """Call `kill` on another signal, instead of interrupting the orderly shutdown.

    Only in the main thread, which handles signals: other threads' shutdowns are a part of the
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
    """Call `notify` on a signal, and raise it at the end.

    For code that an exception at any instruction could leave stuck, such as an event loop; in the
    main thread.
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
    """Raise a signal again that arrived during a finaliser, where exceptions are ignored."""
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
    """Do nothing: the system call has been interrupted, and Python checks signals."""


def install() -> None:
    """Make SIGINT, SIGTERM and SIGHUP stop this process through its finally clauses."""
    _alarm.start()
    sys.unraisablehook = _raise_again
    signal.signal(signal.SIGALRM, _on_alarm)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
