"""`ssd chat`: a conversation on the terminal."""

import contextlib
from collections.abc import Callable
from itertools import zip_longest

import msgspec

from launch.signals import Terminated
from launch.terminal import console
from protocol.client.client import Client
from protocol.errors import SsdError
from protocol.messages import ChatMessage, Finished, Generate, Statistics

HELP = """\
q        quit (so does Ctrl-D)
r        reset: forget the conversation
h        this help
/stats   statistics of the last answer
/draft   colours for drafted tokens, on and off
Ctrl-C   stops the answer, not the program"""


class Chat:
    """One conversation: reads a line, streams an answer, remembers both."""

    def __init__(
        self, client: Client, template: Generate, *, system_prompt: str, show_draft: bool
    ) -> None:
        self._client = client
        self._template = template
        self._system = [ChatMessage("system", system_prompt)] if system_prompt else []
        self._messages = list(self._system)
        self._show_draft = show_draft
        self._last: Statistics | None = None
        self._commands: dict[str, Callable[[], None]] = {
            "r": self._reset,
            "h": lambda: console.stderr().print(HELP, markup=False),
            "/stats": self._statistics,
            "/draft": self._switch_colours,
        }

    def run(self) -> None:
        """Talk until `q` or the end of the input."""
        console.stderr().print("h for help, q to quit", style="dim")
        while True:
            try:
                line = console.ask(">> ").strip()
            except EOFError:
                console.write("\n")
                return
            except KeyboardInterrupt as interrupt:
                _unless_terminated(interrupt)
                console.stderr().print("\nq quits", style="dim")
                continue
            if line == "q":
                return
            if command := self._commands.get(line):
                command()
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        self._messages.append(ChatMessage("user", line))
        pieces: list[str] = []
        try:
            self._stream(pieces)
        except KeyboardInterrupt as interrupt:
            _unless_terminated(interrupt)
            console.stderr().print("\nstopped", style="dim")
        except SsdError as error:
            console.stderr().print(f"error: {error}", markup=False)
        if text := "".join(pieces):
            self._messages.append(ChatMessage("assistant", text))
        else:
            self._messages.pop()  # as if it had not been asked

    def _stream(self, pieces: list[str]) -> None:
        request = msgspec.structs.replace(
            self._template, request=self._client.number(), messages=list(self._messages)
        )
        out = console.stdout()
        with contextlib.closing(self._client.generate(request)) as events:
            for event in events:
                if isinstance(event, Finished):
                    self._last = event.statistics
                    break
                pieces.append(event.text)
                if not self._show_draft:
                    console.write(event.text)
                    continue
                pairs = zip_longest(event.pieces, event.origins, fillvalue="target")
                for piece, origin in pairs:
                    console.write_coloured(out, piece, origin)
        console.write("\n")

    def _reset(self) -> None:
        self._messages = list(self._system)
        console.stderr().print("the conversation is forgotten", style="dim")

    def _statistics(self) -> None:
        if self._last is None:
            console.stderr().print("nothing was answered yet", style="dim")
        else:
            console.stderr().print(console.statistics_table(self._last))

    def _switch_colours(self) -> None:
        self._show_draft = not self._show_draft
        console.stderr().print(console.LEGEND if self._show_draft else "no colours", style="dim")


def _unless_terminated(interrupt: KeyboardInterrupt) -> None:
    """Ctrl-C is for the answer; a request to end is for the program."""
    if isinstance(interrupt, Terminated):
        raise interrupt
