"""Signals as exceptions."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """Somebody wants the program to end: SIGTERM, or its terminal is gone."""


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP stop us as Ctrl-C does: through the finally clauses."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        raise Terminated

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    yield
