"""Extract tool calls from streamed text.

A call is enclosed by the marks of the model's `ToolFormat`. Between <tool_call> and </tool_call> it
is parsed by `syntax`, between other marks by mlx-lm's parsers. Calls may also be in a code block
(Qwen2.5-Coder), or JSON at the beginning of the answer (Llama 3) or of a line. Each is returned as
soon as it is complete. Text that looks like a call but cannot be parsed stays text: nothing that
the model wrote is lost.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.decoding.tokens import overlap
from services.gateway.tools.calls import ParsedCall, ToolFunction
from services.gateway.tools.formats import Parser, ToolFormat
from services.gateway.tools.syntax import CallSyntax

_log = logging.getLogger(__name__)

_FENCE = "```"
_TAGS = {
    "<|python_tag|>": "",  # Llama 3
    # Qwen2.5-Coder
    "<tools>": "</tools>",
    "<response>": "</response>",
}
"""What may stand before a call besides a model's own marks, and after it."""
_BETWEEN = " \t\r\n,;"
"""What may stand between two calls."""
_AFTER_LINE = re.compile(r"\n[ \t]*\Z")

Found = str | ParsedCall
"""A piece of text, or a call."""


@dataclass
class _Place:
    """Where a call may be: after a mark, the start of a code block, or of a line."""

    start: str = ""
    """The text that led here."""
    end: str = ""
    """What ends it; empty if nothing does."""
    parse: Parser | None = None
    marked: bool = False
    """True after a model's own mark."""
    called: bool = False
    """True once it has held a call."""


class ToolReader:
    """One answer's text, split into text and calls."""

    def __init__(
        self,
        functions: Sequence[ToolFunction],
        form: ToolFormat | None = None,
        *,
        bare_calls: bool = True,
    ) -> None:
        """Start reading; `bare_calls`: JSON without marks may be a call."""
        self._syntax = CallSyntax(functions)
        self._tools = [function.describe() for function in functions]
        self._form = form or ToolFormat()
        self._bare = bare_calls
        self._starts = re.compile(
            rf"(?P<mark>{re.escape(self._form.start)})|(?P<fence>{_FENCE}[\w-]*[ \t]*\n?)"
            rf"|(?P<tag>{'|'.join(map(re.escape, _TAGS))})|(?P<line>\n[ \t]*(?=[\[{{]))"
        )
        self._held = self._new = ""
        self._last = ""
        """The last visible character of the text that was released."""
        self._in_code = False
        """True within a code block that is text."""
        self._place: _Place | None = _Place() if bare_calls else None
        self._ended = self._cut_off = False

    def push(self, text: str) -> list[Found]:
        """Return the text that certainly belongs to no call, and the completed calls."""
        self._held += text
        self._new = text
        found: list[Found] = []
        while (step := self._inside() if self._place else self._outside()) is not None:
            found += step
        return [part for part in found if part]

    def end(self, *, cut_off: bool = False) -> list[Found]:
        """Return what was held back, once the text has ended; `cut_off`: by a limit."""
        self._ended, self._cut_off = True, cut_off
        return self.push("")

    def _outside(self) -> list[Found] | None:
        """Release the text before the next place of a call, or enter it; None: await more text."""
        match = self._starts.search(self._held)
        if match is None:
            return self._release(len(self._held) - (0 if self._ended else self._count_open()))
        if match.start():
            return self._release(match.start())
        if match.lastgroup == "fence" and match.end() == len(self._held) and not self._ended:
            return None
        return self._enter(match)

    def _enter(self, match: re.Match[str]) -> list[Found] | None:
        """Enter the place that begins the held text, or release its mark as text."""
        kind, marked = match.lastgroup or "", match.lastgroup == "mark"
        if self._in_code and kind == "fence":
            self._in_code = False
            return self._release(match.end())
        if kind in {"tag", "line"} and not self._may_be_bare():
            return self._release(match.end())
        if kind == "line":
            self._place = _Place()
            return self._release(match.end())
        self._held = self._held[match.end() :]
        end = {"mark": self._form.end, "fence": _FENCE}.get(kind) or _TAGS.get(match[0], "")
        self._place = _Place(match[0], end, self._form.parse if marked else None, marked)
        return []

    def _may_be_bare(self) -> bool:
        """Return True if a call without marks may follow: not within code or a JSON document."""
        return self._bare and not self._in_code and self._last not in {"[", "{", ","}

    def _count_open(self) -> int:
        """Return how many of the last characters may begin the place of a call."""
        line = _AFTER_LINE.search(self._held)
        marks = (self._form.start, _FENCE, *_TAGS)
        return max(len(line[0]) if line else 0, *(overlap(self._held, mark) for mark in marks))

    def _release(self, length: int) -> list[Found] | None:
        if not length:
            return None
        text, self._held = self._held[:length], self._held[length:]
        self._last = text.rstrip()[-1:] or self._last
        return [text]

    def _inside(self) -> list[Found] | None:
        """Return the next call, or leave its place; None until more text arrives."""
        place = self._place
        assert place is not None  # noqa: S101  # else `_outside` was called
        body = self._held.lstrip(_BETWEEN if place.called else None)
        if place.end and body.startswith(place.end):
            lead = self._held[: len(self._held) - len(body)]
            self._held = body[len(place.end) :]
            self._place = None
            return [] if place.called else [place.start + lead + place.end]
        if not self._ended and place.end.startswith(body):
            return None
        if not body or not (place.parse or self._syntax.may_begin(body)):
            return self._leave(place)
        read = self._read(place, body)
        if read is None and not self._ended:
            return None
        calls, length = read or ([], 0)
        if not calls and self._cut_off and (partial := self._syntax.read_partial(body)):
            calls, length = [partial], len(body)
        if not calls:
            return self._leave(place)
        self._held, place.called = body[length:], True
        return list(calls)

    def _leave(self, place: _Place) -> list[Found]:
        """Leave the place of a call: what follows is text."""
        self._place = None
        if place.called and not self._held.strip(_BETWEEN):
            self._held = ""
        self._in_code = place.end == _FENCE
        self._last = place.start.rstrip()[-1:] or self._last
        return [] if place.called else [place.start]

    def _read(self, place: _Place, body: str) -> tuple[list[ParsedCall], int] | None:
        """Return the calls at the beginning and their length; None if they are not complete."""
        if not place.parse and body[0] in "[{":
            if not self._ended and not {"]", "}", place.end[-1:]} & set(self._new):
                return None
            read = self._syntax.read_json(body, marked=place.marked, ended=self._ended)
            if read is None or read[1]:
                return read
        inner, mark, _ = body.partition(place.end) if place.end else (body, "", "")
        if not mark and not self._ended:
            return None
        if not place.parse:
            return self._syntax.read_text(inner), len(inner)
        start = self._form.start if self._form.has_inner_name else ""
        return self._run_parser(place.parse, start + inner), len(inner)

    def _run_parser(self, parse: Parser, text: str) -> list[ParsedCall]:
        try:
            parsed = parse(text, self._tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            return self._syntax.make_calls(calls)
        # The parsers raise errors of any kind for a broken call, often with its text, which must
        # not be logged.
        except Exception as error:  # noqa: BLE001
            _log.info("a tool call cannot be parsed (%s)", type(error).__name__)
            return []
