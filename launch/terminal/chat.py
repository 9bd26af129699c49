"""`ssd chat`: a conversation on the terminal."""

import contextlib
from collections.abc import Callable
from itertools import zip_longest

import msgspec

from launch.models.names import name_of_folder
from launch.signals import Terminated
from launch.terminal import console
from launch.terminal.generate import notes, stream_with_progress
from launch.terminal.line_editor import LineEditor, typing_hidden
from protocol.client.client import Client
from protocol.errors import SsdError
from protocol.messages import ChatMessage, Finished, Generate, Status, Text

HELP = """\
/help          this help
/reset         forget the conversation
/system TEXT   begin anew with this system prompt; without TEXT: with none
/stats         statistics of the last answer
/draft         colours for drafted tokens, on and off
/quit          end (so does Ctrl-D)
Ctrl-C         stops the answer, not the program
Alt-Enter      a new line; so does a backslash at the end of a line
//             a message that begins with a slash"""


class Chat:
    """One conversation: reads a message, streams an answer, and keeps both."""

    def __init__(
        self, client: Client, template: Generate, *, system_prompt: str, show_draft: bool
    ) -> None:
        self._client = client
        self._template = template
        self._system = [ChatMessage("system", system_prompt)] if system_prompt else []
        self._messages = list(self._system)
        self._show_draft = show_draft
        self._last: tuple[Finished, int] | None = None
        """The end of the last answer, and its tokens."""
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: console.stderr().print(HELP, markup=False),
            "/reset": lambda _: self._reset(),
            "/system": self._set_system,
            "/stats": lambda _: self._print_statistics(),
            "/draft": lambda _: self._switch_colours(),
        }

    def run(self) -> None:
        """Chat until `/quit` or the end of the input."""
        status = self._client.status()
        console.note(f"{describe_models(status)}; /help shows the commands")
        for sentence in status.degraded:
            console.note(sentence)
        editor = LineEditor()
        while True:
            try:
                message = editor.ask(">> ").strip()
            except EOFError:
                console.write("\n")
                return
            except KeyboardInterrupt as interrupt:
                _unless_terminated(interrupt)
                console.note("/quit ends the conversation")
                continue
            if message in {"/quit", "/exit"}:
                return
            self._handle(message)

    def _handle(self, message: str) -> None:
        word, _, rest = message.partition(" ")
        if message.startswith("//"):
            self._answer(message[1:])
        elif command := self._commands.get(word):
            command(rest.strip())
        elif message.startswith("/"):
            console.note(f"there is no command {word}; /help lists them")
        elif message:
            self._answer(message)

    def _answer(self, message: str) -> None:
        self._messages.append(ChatMessage("user", message))
        pieces: list[str] = []
        try:
            with typing_hidden():
                self._stream(pieces)
        except KeyboardInterrupt as interrupt:
            _unless_terminated(interrupt)
            console.stderr().print("\nstopped", style="dim")
        except SsdError as error:
            console.stderr().print(f"error: {error}", markup=False)
        if text := "".join(pieces):
            self._messages.append(ChatMessage("assistant", text))
        else:
            self._messages.pop()  # as if the question had not been asked

    def _stream(self, pieces: list[str]) -> None:
        request = msgspec.structs.replace(
            self._template, request=self._client.number(), messages=list(self._messages)
        )
        tokens = 0
        with contextlib.closing(stream_with_progress(self._client, request)) as events:
            for event in events:
                if isinstance(event, Finished):
                    self._last = event, tokens
                    break
                tokens += len(event.tokens)
                pieces.append(event.text)
                self._print(event)
        console.write("\n")
        if self._last is not None:
            for sentence in notes(self._last[0], request):
                console.note(sentence)

    def _print(self, event: Text) -> None:
        if not self._show_draft:
            console.write(event.text)
            return
        out = console.stdout()
        for piece, origin in zip_longest(event.pieces, event.origins, fillvalue="target"):
            console.write_coloured(out, piece, origin)

    def _reset(self) -> None:
        self._messages = list(self._system)
        console.note("the conversation is forgotten")

    def _set_system(self, text: str) -> None:
        self._system = [ChatMessage("system", text)] if text else []
        self._reset()

    def _print_statistics(self) -> None:
        if self._last is None:
            console.note("nothing was answered yet")
        else:
            from launch.terminal.statistics import peak_memory, statistics_table  # noqa: PLC0415

            finished, tokens = self._last
            memory = peak_memory(self._client)
            console.stderr().print(statistics_table(finished, tokens, memory=memory))

    def _switch_colours(self) -> None:
        self._show_draft = not self._show_draft
        console.note(console.LEGEND if self._show_draft else "no colours")


def describe_models(status: Status) -> str:
    """Describe the answering model and its drafter."""
    text = name_of_folder(status.model)
    drafter = status.drafter
    if drafter is None:
        return f"{text}, {'with prompt lookup' if status.lookup_only else 'without a drafter'}"
    name = name_of_folder(drafter.model) or drafter.backend
    return f"{text}, drafted by {name} ({drafter.backend})"


def _unless_terminated(interrupt: KeyboardInterrupt) -> None:
    """Treat Ctrl-C as an end of the answer; re-raise a request to end the program."""
    if isinstance(interrupt, Terminated):
        raise interrupt
