"""From emitted tokens to streamed text: stop strings, and text that may still become one."""

from typing import NamedTuple

from orchestrator.text.detokenizer import TextStream
from protocol.messages import Logprobs, TokenLogprobs


class Pushed(NamedTuple):
    """What one token did to the text."""

    text: str
    """Text that is certain and may be shown."""
    stopped: bool
    """A stop string is complete; the text ends before it."""


class StoppableText:
    """Decodes token by token, and holds back what may be the start of a stop string."""

    def __init__(self, stream: TextStream, stop: list[str]) -> None:
        self._stream = stream
        self._stop = [string for string in stop if string]
        self._held = ""
        self.stop_string = ""
        """The stop string that was found."""

    def push(self, token: int) -> Pushed:
        """Add one token."""
        self._held += self._stream.push(token)
        found = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            at, self.stop_string = min(found)
            text, self._held = self._held[:at], ""
            return Pushed(text, stopped=True)
        keep = max((_overlap(self._held, string) for string in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return Pushed(text, stopped=False)

    def describe(self, token: int, logprobs: TokenLogprobs) -> Logprobs:
        """A token and the likeliest ones in its place, as clients see them."""
        show = self._stream.describe
        return Logprobs(show(token, logprobs.own), [show(t, value) for t, value in logprobs.best])

    def flush(self) -> str:
        """The text still held back, once no more tokens come."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Length of the longest ending of `text` that begins `string` without completing it."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if string.startswith(text[-length:]):
            return length
    return 0
