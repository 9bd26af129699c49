"""Signals: the first ends us in an orderly way, another one at once. Neither leaves anything."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN_S = 0.01
"""Until a signal is raised again that nobody could catch."""


class Terminated(KeyboardInterrupt):
    """Somebody wants the program to end: SIGTERM, or its terminal is gone."""


_second_signal: list[Callable[[], None]] = []
_deferred: list[Callable[[type[KeyboardInterrupt]], None]] = []
_lost: list[type[BaseException]] = []


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
        if arrived:
            raise Terminated if Terminated in arrived else KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
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


def install() -> None:
    """SIGINT, SIGTERM and SIGHUP stop this process alike: through its finally clauses."""
    sys.unraisablehook = _raise_again
    signal.signal(signal.SIGALRM, _on_alarm)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
