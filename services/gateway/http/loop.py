"""The gateway's event loop and listening socket."""

import asyncio
import selectors
import socket
from typing import Any

from protocol.process.awake_clock import awake_time
from protocol.process.step_times import StepTimes

ACCEPTS = 16
"""Connections that are accepted in one step, at most."""
_BACKLOG = 4096
"""Connections in line for that. A client that finds no room tries again after 1, 3 and 7 s."""


class ListeningSocket(socket.socket):
    """A listening socket whose line is longer than what is accepted in one step."""

    def listen(self, backlog: int = _BACKLOG, /) -> None:
        """Listen; asyncio asks for as short a line as it accepts in one step."""
        super().listen(max(backlog, _BACKLOG))


class _StepSelector(selectors.DefaultSelector):
    """Between two waits is one step of the loop."""

    def __init__(self, steps: StepTimes) -> None:
        super().__init__()
        self._steps = steps

    def select(self, timeout: float | None = None) -> Any:
        """Wait for events."""
        self._steps.end()
        ready = super().select(timeout)
        self._steps.begin()
        return ready


class AwakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers stand still while this process is stopped."""

    def __init__(self, steps: StepTimes) -> None:
        super().__init__(_StepSelector(steps))

    def time(self) -> float:
        """The time of all timers."""
        return awake_time()
