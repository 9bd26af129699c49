"""An answer as it arrives: thoughts, text and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from protocol.messages import Logprobs, Text
from services.gateway.reasoning import Thought, ThoughtFormat, ThoughtReader, find_thought_format
from services.gateway.template import ModelText
from services.gateway.tools.calls import ParsedCall, ToolFunction

if TYPE_CHECKING:
    from services.gateway.tools.reader import ToolReader

Part = Thought | str | ParsedCall
"""A piece of a thought, a piece of the answer's text, or a tool call."""


class AnswerReader(Protocol):
    """Splits an answer's streamed text into its parts."""

    @property
    def is_thinking(self) -> bool:
        """True if the latest text is within a thought."""
        ...

    def push(self, text: str) -> Sequence[Part]:
        """Return the parts that are certain, in order."""
        ...

    def end(self, *, cut_off: bool = False) -> Sequence[Part]:
        """Return what was held back, once the text has ended; `cut_off`: by a limit."""
        ...


class PartsReader:
    """Reads thoughts first, then calls in the remaining text."""

    def __init__(self, thoughts: ThoughtReader | None, tools: "ToolReader | None") -> None:
        self._thoughts = thoughts
        self._tools = tools

    @property
    def is_thinking(self) -> bool:
        """True while the thought reader is within a thought."""
        return self._thoughts is not None and self._thoughts.is_thinking

    def push(self, text: str) -> Sequence[Part]:
        """Return the parts that are certain, in order."""
        return self._read_calls(self._thoughts.push(text) if self._thoughts else [text])

    def end(self, *, cut_off: bool = False) -> Sequence[Part]:
        """Return what both readers held back."""
        parts = self._read_calls(self._thoughts.end()) if self._thoughts else []
        return [*parts, *(self._tools.end(cut_off=cut_off) if self._tools else [])]

    def _read_calls(self, pieces: Sequence[Thought | str]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            if isinstance(piece, Thought) or self._tools is None:
                parts.append(piece)
            else:
                parts += self._tools.push(piece)
        return [part for part in parts if part]


class Beginning(NamedTuple):
    """The beginning of an answer, after the prompt."""

    text: str = ""
    in_thought: bool = False
    """True if a thought continues after it."""
    in_answer: bool = False
    """True if the answer itself has started."""


class AnswerFormat(NamedTuple):
    """How a model writes thoughts and calls."""

    text: ModelText | None = None
    """The model whose own format calls have; None: JSON within <tool_call>."""
    thoughts: ThoughtFormat | None = None
    harmony: bool = False
    special_marks: bool = False
    """True if the marks of thoughts are special tokens, which are text only on request."""

    def reader(
        self,
        functions: Sequence[ToolFunction],
        *,
        opened: bool = False,
        begun: bool = False,
        bare_calls: bool = True,
    ) -> AnswerReader:
        """Return a reader for one answer.

        Args:
            functions: those that may be called.
            opened: the prompt ends within a thought.
            begun: the prompt ends within the answer, whose beginning the client has.
            bare_calls: an answer that is one JSON object may be a call.
        """
        if self.harmony:
            from services.gateway.tools.harmony import HarmonyReader  # noqa: PLC0415

            return HarmonyReader(begun=begun)
        thoughts = ThoughtReader(self.thoughts, opened=opened) if self.thoughts else None
        if not functions:
            return PartsReader(thoughts, None)
        from services.gateway.tools.formats import find_tool_format  # noqa: PLC0415
        from services.gateway.tools.reader import ToolReader  # noqa: PLC0415

        form = find_tool_format(self.text) if self.text else None
        return PartsReader(thoughts, ToolReader(functions, form, bare_calls=bare_calls))

    def begin(self, start: str, thought: str, *, opened: bool, thinks: bool) -> Beginning:
        """Return the beginning of an answer; a thought without a text goes on.

        Args:
            start, thought: what the client has of the answer.
            opened: True if the prompt ends within a thought.
            thinks: True if the model may think.
        """
        if self.harmony:
            from services.gateway.tools.harmony import FINAL_CHANNEL, write_thought  # noqa: PLC0415

            text = f"{write_thought(thought)}{FINAL_CHANNEL}{start}" if start else ""
            return Beginning(text, in_answer=bool(start))
        if self.thoughts is None:
            return Beginning(start)
        mark, end, _ = self.thoughts
        if thought:
            start = f"{mark}\n{thought}" + (f"\n{end}\n\n{start}" if start else "")
        if opened and start.lstrip().startswith(mark):
            # The client has the thought that the prompt opens.
            start = start.lstrip().removeprefix(mark)
        elif opened and (start or not thinks) and end not in start:
            return Beginning(f"{end}\n\n{start}")
        marks = start.rfind(mark) - start.rfind(end)
        return Beginning(start, in_thought=marks > 0 if marks else opened)

    def write_thought_end(self, *, opens_answer: bool) -> str:
        """Return the text that ends a thought; empty if the model does not mark thoughts.

        Args:
            opens_answer: the channel of the answer is opened, too, if the model has channels.
        """
        if self.harmony:
            from services.gateway.tools.harmony import FINAL_CHANNEL, THOUGHT_END  # noqa: PLC0415

            return THOUGHT_END + (FINAL_CHANNEL if opens_answer else "")
        return f"\n{self.thoughts.end}\n\n" if self.thoughts else ""


class AnswerGrammar(NamedTuple):
    """The grammar of an answer, and how to parse it."""

    form: AnswerFormat
    text: str = ""
    """The grammar; empty allows any text."""
    after_thought: str = ""
    """Grammar of what must follow a thought that was cut short."""
    bare_calls: bool = True
    """True if an answer that is one JSON object may be a call."""


def find_answer_format(text: ModelText) -> AnswerFormat:
    """Return the answer format of a model."""
    if "<|channel|>" in text.template and "<|message|>" in text.template:
        return AnswerFormat(text, harmony=True, special_marks=True)
    thoughts = find_thought_format(text)
    marks = (thoughts.start, thoughts.end) if thoughts else ()
    special = [token for token, hidden in text.added_tokens.items() if hidden]
    hidden = any(token in mark for token in special for mark in marks)
    return AnswerFormat(text, thoughts, special_marks=hidden)


@dataclass(frozen=True)
class Piece:
    """The addition of one message."""

    parts: Sequence[Part] = ()
    first_call: int = 0
    """Number of calls before these."""
    logprobs: list[Logprobs] = field(default_factory=list)
    origins: list[tuple[str, str]] = field(default_factory=list)
    """The origin of each token, and the text that became certain with it."""

    @property
    def content(self) -> str:
        """The answer's text in it."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        """The thoughts in it."""
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> list[ParsedCall]:
        """The calls in it."""
        return [part for part in self.parts if isinstance(part, ParsedCall)]


class Transcript:
    """One answer."""

    def __init__(self, reader: AnswerReader, *, one_call: bool = False) -> None:
        """Start a transcript; `one_call`: keep only the first call."""
        self._reader = reader
        self._one_call = one_call
        self.parts: list[Part] = []
        """Adjacent pieces of one kind are joined."""
        self.calls: list[ParsedCall] = []
        self.tokens = 0
        self.reasoning_tokens = 0

    @property
    def content(self) -> str:
        """The answer's text so far."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        """The thoughts so far."""
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, none of them truncated."""
        return bool(self.calls) and all(call.complete for call in self.calls)

    def push(self, text: Text) -> Piece:
        """Add newly generated text."""
        parts: list[Part] = []
        for number, piece in enumerate(text.pieces):
            thinking = self._reader.is_thinking
            parts += self._reader.push(piece)
            # Text that was held back until the end belongs to no token.
            if number < len(text.tokens):
                self.reasoning_tokens += thinking or self._reader.is_thinking
        self.tokens += len(text.tokens)
        origins = [(str(o), piece) for o, piece in zip(text.origins, text.pieces, strict=False)]
        return self._add(parts, text.logprobs, origins)

    def end(self, *, cut_off: bool = False) -> Piece:
        """Add what was held back until the end; `cut_off`: by a limit."""
        return self._add(self._reader.end(cut_off=cut_off), [], [])

    def _add(
        self, parts: Sequence[Part], logprobs: list[Logprobs], origins: list[tuple[str, str]]
    ) -> Piece:
        first_call = len(self.calls)
        taken: list[Part] = []
        for part in parts:
            if isinstance(part, ParsedCall):
                if self._one_call and self.calls:
                    continue
                self.calls.append(part)
            taken.append(part)
        for part in taken:
            self._join(part)
        return Piece(taken, first_call, logprobs, origins)

    def _join(self, part: Part) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(part, str) and isinstance(last, str):
            self.parts[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            self.parts[-1] = Thought(last.text + part.text)
        else:
            self.parts.append(part)
