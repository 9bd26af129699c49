"""Stop strings: streamed text without anything that may become part of one."""

from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from orchestrator.text.detokenizer import TextStream
from protocol.decoding.tokens import overlap
from protocol.messages import Logprobs, TokenLogprobs


class Pushed(NamedTuple):
    """The effect of one token on the text."""

    text: str
    """Text that is final and may be shown."""
    stopped: bool
    """True if a stop string is complete; the text ends before it."""


@dataclass
class _HeldEntry:
    """The log-probabilities of a token whose text is not final yet."""

    shown: Logprobs
    length: int
    """Length of its text."""

    def cut(self, count: int) -> None:
        """Remove the last characters of its text."""
        chosen = self.shown.chosen
        kept = self.length - count
        dropped = len(chosen.text[kept:].encode())
        data = chosen.data[: max(0, len(chosen.data) - dropped)] if kept else []
        shown = replace(chosen, text=chosen.text[:kept], data=data)
        self.shown = replace(self.shown, chosen=shown)
        self.length = kept


class StoppableText:
    """Decodes token by token, and holds back text that may begin a stop string.

    Log-probabilities are held back with the text of their tokens, and truncated with it.
    """

    def __init__(self, stream: TextStream, stop: list[str]) -> None:
        self._stream = stream
        self._stop = [string for string in stop if string]
        self._held = ""
        self._entries: list[_HeldEntry] = []
        self.stop_string = ""
        """The stop string that ended the text."""

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> Pushed:
        """Add one token."""
        text = self._stream.push(token)
        if logprobs is not None:
            self._entries.append(_HeldEntry(self._describe(token, text, logprobs), len(text)))
        self._held += text
        matches = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if matches:
            at, self.stop_string = min(matches)
            self._cut_entries(len(self._held) - at)
            text, self._held = self._held[:at], ""
            return Pushed(text, stopped=True)
        keep = max((overlap(self._held, string) for string in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return Pushed(text, stopped=False)

    def take_logprobs(self) -> list[Logprobs]:
        """Return the log-probabilities of tokens whose text became final since the last call."""
        held = len(self._held)
        count = len(self._entries)
        while count and held > 0:
            count -= 1
            held -= self._entries[count].length
        # The first bytes of a character are released with its last one.
        while 0 < count < len(self._entries) and not self._entries[count - 1].length:
            count -= 1
        taken, self._entries = self._entries[:count], self._entries[count:]
        return [entry.shown for entry in taken]

    def _describe(self, token: int, text: str, logprobs: TokenLogprobs) -> Logprobs:
        """Describe a token and its most likely alternatives, as clients see them."""
        chosen = self._stream.describe_pushed(token, text, logprobs.chosen)
        best = [
            chosen if other == token else self._stream.describe(other, value)
            for other, value in logprobs.best
        ]
        return Logprobs(chosen, best)

    def _cut_entries(self, count: int) -> None:
        """Remove the last characters; partial characters go with them."""
        is_cut = False
        for entry in reversed(self._entries):
            if not count and (entry.length or not is_cut):
                return
            is_cut = entry.length <= count
            dropped = min(entry.length, count)
            entry.cut(dropped)
            count -= dropped

    def flush(self) -> str:
        """Return the text that is still held back at the end of the answer."""
        text, self._held = self._held + self._stream.end(), ""
        return text
