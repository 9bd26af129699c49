"""User input: with an editor on a terminal, line by line from a pipe."""

import asyncio
import contextlib
import os
import select
import sys
import termios
from asyncio import AbstractEventLoop
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from launch.signals import defer

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

_CONTINUED = "\\"
_WAIT_S = 0.2


class LineEditor:
    """Asks for messages, with history and editing; a message may have several lines.

    On a terminal Alt-Enter begins a new line, and pasted text keeps its lines; everywhere a line
    that ends with a backslash continues.
    """

    def __init__(self) -> None:
        self._session: PromptSession[str] | None = None
        self._typed = b""
        """Input from a terminal that has not been requested yet."""
        if sys.stdin.isatty() and sys.stdout.isatty():
            self._session = _open_session()

    def ask(self, prompt: str) -> str:
        """Return a message; raise EOFError at the end of the input."""
        lines = [self._ask(prompt)]
        while lines[-1].endswith(_CONTINUED):
            lines[-1] = lines[-1].removesuffix(_CONTINUED)
            lines.append(self._ask("." * (len(prompt) - 1) + " "))
        return "\n".join(lines)

    def _ask(self, prompt: str) -> str:
        if self._session is not None:
            return _Question(self._session).ask(prompt)
        return self._read_line(prompt) if sys.stdin.isatty() else input(prompt)

    def _read_line(self, prompt: str) -> str:
        """Return a line from a terminal without editing; input after it is kept."""
        print(prompt, end="", flush=True)
        while b"\n" not in self._typed:
            # A signal just before a read does not interrupt it; its handler runs between two waits.
            if not select.select([sys.stdin], [], [], _WAIT_S)[0]:
                continue
            typed = os.read(sys.stdin.fileno(), 4096)
            if not typed and not self._typed:
                raise EOFError
            self._typed += typed or b"\n"  # the end of the input ends a line, too
        line, _, self._typed = self._typed.partition(b"\n")
        return line.decode(sys.stdin.encoding, "replace")


class _Question:
    """A line that is being typed. A signal would leave its event loop stuck, so it ends the loop.

    Args:
        session: the editor.
    """

    def __init__(self, session: "PromptSession[str]") -> None:
        self._session = session
        self._loop: AbstractEventLoop | None = None
        self._is_interrupted = False

    def ask(self, prompt: str) -> str:
        """Return the typed line."""
        with defer(self._interrupt):
            return self._session.prompt(prompt, pre_run=self._on_start, handle_sigint=False)

    def _on_start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._is_interrupted:
            self._end()

    def _interrupt(self) -> None:
        self._is_interrupted = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: the question has ended
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        answer = self._session.app.future
        if answer is not None and not answer.done():
            answer.set_exception(KeyboardInterrupt())


def _open_session() -> "PromptSession[str] | None":
    """Return None on a terminal that cannot move its cursor: it would be read without our hooks."""
    # Slow to import, and needed on a terminal only.
    from prompt_toolkit import PromptSession  # noqa: PLC0415
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent  # noqa: PLC0415
    from prompt_toolkit.utils import is_dumb_terminal  # noqa: PLC0415

    if is_dumb_terminal():
        return None
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def insert_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(key_bindings=keys)


@contextlib.contextmanager
def typing_hidden() -> Iterator[None]:
    """Disable echo within the block; typed keys wait for the next question."""
    if not sys.stdin.isatty():
        yield
        return
    before: list[Any] = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    # Ctrl-C remains a signal, and does not discard earlier input.
    quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
