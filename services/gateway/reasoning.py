"""Separate thoughts from the answer, for the model families that mark them.

Marks and their families: <think> (Qwen, DeepSeek, GLM, MiniMax, SmolLM and others), [THINK]
(Magistral), <seed:think>, <longcat_think>, <|think:start|>, Gemma 4's thought channel, Kimi K3's
sections. gpt-oss has its own channels (`tools/harmony.py`).
"""

from typing import Literal, NamedTuple, Protocol

from protocol.decoding.tokens import overlap
from protocol.messages import Text
from services.gateway.template import ModelText


class ThoughtFormat(NamedTuple):
    """The marks of a thought."""

    start: str
    end: str
    anywhere: bool = False
    """True if thoughts may also start after the answer's start; the mark occurs in no text."""


_FORMATS = (
    ThoughtFormat("<think>", "</think>"),
    ThoughtFormat("<longcat_think>", "</longcat_think>"),
    ThoughtFormat("<|think:start|>", "<|think:end|>", anywhere=True),
    ThoughtFormat("[THINK]", "[/THINK]"),
    ThoughtFormat("<seed:think>", "</seed:think>"),
    ThoughtFormat("<|channel>thought", "<channel|>", anywhere=True),
    ThoughtFormat("<|open|>think<|sep|>", "<|close|>think<|sep|>", anywhere=True),
)


def find_thought_format(text: ModelText) -> ThoughtFormat | None:
    """Return the thought format of a model; None if it does not mark thoughts."""
    for form in _FORMATS:
        if form.end in text.template or {form.start, form.end} <= text.added_tokens.keys():
            return form
    return None


class Thought(NamedTuple):
    """A piece of a thought."""

    text: str


class ThoughtReader:
    """Splits streamed text into thoughts and answer.

    Whitespace between a mark and the adjacent text belongs to neither.
    """

    def __init__(self, form: ThoughtFormat, *, opened: bool = False) -> None:
        """Start reading; `opened`: the prompt ends within a thought."""
        self._form = form
        self._held = ""
        self._state: Literal["start", "thought", "answer"] = "thought" if opened else "start"
        """start: a thought may start here."""
        self._trim = opened
        """True if whitespace is dropped from the next text."""

    @property
    def is_thinking(self) -> bool:
        """True if the latest text is within a thought."""
        return self._state == "thought"

    def push(self, text: str) -> list[Thought | str]:
        """Return what is certainly thought or answer, in order."""
        self._held += text
        found: list[Thought | str] = []
        while True:
            state = self._state
            piece = self._read_thought() if state == "thought" else self._read_answer()
            if piece:
                found.append(Thought(piece) if state == "thought" else piece)
            if state == self._state:
                return found

    def end(self) -> list[Thought | str]:
        """Return what was held back; a thought that was cut off stays a thought."""
        held, self._held = self._held, ""
        if self._state != "thought":
            return [held] if held and not (self._trim and not held.strip()) else []
        return [Thought(held.rstrip())] if held.strip() else []

    def _read_thought(self) -> str:
        if self._trim:
            self._held = self._held.lstrip()
        thought, mark, rest = self._held.partition(self._form.end)
        if mark:
            self._held, self._trim = rest, True
            self._state = "start" if self._form.anywhere else "answer"
            return thought.rstrip()
        certain = len(self._held) - overlap(self._held, self._form.end)
        return self._take(len(self._held[:certain].rstrip()))

    def _read_answer(self) -> str:
        if self._trim:
            self._held = self._held.lstrip()
        if self._state == "start":
            found = self._held.find(self._form.start)
            if found >= 0 and (self._form.anywhere or not self._held[:found].strip()):
                before = self._take(found)
                self._held = self._held.removeprefix(self._form.start)
                self._state, self._trim = "thought", True
                return before if before.strip() else ""
            if self._form.anywhere:
                return self._take(len(self._held) - overlap(self._held, self._form.start))
            if self._form.start.startswith(self._held.lstrip()):
                return ""  # may still become the mark
            self._state = "answer"
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        """Remove and return the first characters of what was held back."""
        text, self._held = self._held[:count], self._held[count:]
        self._trim = self._trim and not text
        return text


class _Thinking(Protocol):
    """A reader that knows if the latest text is within a thought."""

    @property
    def is_thinking(self) -> bool: ...

    def push(self, text: str) -> object: ...


class ThoughtLimit:
    """Watches an answer until its first thought has used up its tokens.

    Args:
        reader: of the answer.
        tokens: the budget.
        end: the text that ends the thought.
        after: the grammar of what follows it; empty allows any text.
    """

    def __init__(self, reader: _Thinking, tokens: int, *, end: str, after: str = "") -> None:
        self._reader = reader
        self._left = tokens
        self.end = end
        self.after = after

    def is_reached(self, text: Text) -> bool:
        """Read newly generated text; return True if the thought must end now."""
        for piece in text.pieces:
            self._reader.push(piece)
            self._left -= self._reader.is_thinking
        return self._reader.is_thinking and self._left <= 0
