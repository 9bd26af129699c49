"""An answer as it comes in: what each message of the orchestrator adds to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.messages import Logprobs, Text
from services.gateway.schema import ToolFunction
from services.gateway.tool_format import ToolFormat
from services.gateway.tools import ParsedCall, ToolReader


@dataclass(frozen=True)
class Piece:
    """What one message adds."""

    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    first_call: int = 0
    """How many calls came before these."""
    logprobs: list[Logprobs] = field(default_factory=list)
    origins: list[tuple[str, str]] = field(default_factory=list)
    """Where each token came from, and the text that became certain with it."""


class Transcript:
    """One answer; `functions` are the tools that it may call, `form` is how it writes calls."""

    def __init__(
        self, functions: Sequence[ToolFunction] = (), form: ToolFormat | None = None
    ) -> None:
        self._reader = ToolReader(functions, form) if functions else None
        self.content = ""
        self.calls: list[ParsedCall] = []
        self.logprobs: list[Logprobs] = []
        self.tokens = 0

    def push(self, text: Text) -> Piece:
        """Take in newly emitted text."""
        self.tokens += len(text.tokens)
        self.logprobs += text.logprobs
        content, calls = self._reader.push(text.text) if self._reader else (text.text, [])
        # Text that was held back until the end belongs to no token.
        origins = list(zip(text.origins, text.pieces, strict=False)) if text.origins else []
        return self._add(content, calls, text.logprobs, [(str(o), piece) for o, piece in origins])

    def end(self) -> Piece:
        """What was held back until it was clear that it is no call."""
        content, calls = self._reader.end() if self._reader else ("", [])
        return self._add(content, calls, [], [])

    def _add(
        self,
        content: str,
        calls: list[ParsedCall],
        logprobs: list[Logprobs],
        origins: list[tuple[str, str]],
    ) -> Piece:
        piece = Piece(content, calls, len(self.calls), logprobs, origins)
        self.content += content
        self.calls += calls
        return piece
