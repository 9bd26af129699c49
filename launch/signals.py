"""Signals: the first ends us in an orderly way, another one at once. Neither leaves anything."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """Somebody wants the program to end: SIGTERM, or its terminal is gone."""


_second_signal: list[Callable[[], None]] = []


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


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    if not _second_signal:
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated
    for kill in list(_second_signal):
        kill()


def install() -> None:
    """SIGINT, SIGTERM and SIGHUP stop this process alike: through its finally clauses."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
