"""Single keys from a terminal, while the screen is redrawn continuously."""

import select
import sys
import termios
import time
import tty
from typing import Any

from protocol.process.closeable import Closeable


class Keys(Closeable):
    """Reads keys as they are pressed; without a terminal it only waits."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)

    def wait(self, seconds: float) -> str:
        """Return the pressed key, or "" if none was within `seconds`."""
        if self._before is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    def close(self) -> None:
        """Restore the terminal."""
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
            self._before = None
