"""Extract tool calls from streamed text.

A call is enclosed by the marks of the model's `ToolFormat`. Between <tool_call> and </tool_call> it
is JSON (Hermes, Qwen) or XML (Qwen-Coder); other marks have mlx-lm's parsers. Or the whole answer
is one JSON object that names a tool (Llama 3), or a JSON code block holds such objects
(Qwen2.5-Coder). Text that looks like a call but cannot be parsed stays text: nothing that the model
wrote is lost.
"""

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from services.gateway.tools.calls import ParsedCall, ToolFunction, new_call_id
from services.gateway.tools.formats import Parser, ToolFormat

_log = logging.getLogger(__name__)

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_WHOLE_JSON = ("{", "<|python_tag|>")
"""Starts of an answer that may be a single call."""
_CODE = re.compile(r"```json\s*(?=[\[{])|```(?:j(?:s(?:o(?:n\s*)?)?)?)?\Z|`{1,2}\Z")
"""The start of a code block that may hold calls; at the text's end, any prefix of it."""
_CODE_END = "\n```"
"""JSON strings contain no line break, so none contains this."""
_JSON_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_JSON_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')

Found = str | ParsedCall
"""A piece of text, or a call."""


class ToolReader:
    """One answer's text, split into text and calls."""

    def __init__(
        self,
        functions: Sequence[ToolFunction],
        form: ToolFormat | None = None,
        *,
        bare_calls: bool = True,
    ) -> None:
        """Start reading; `bare_calls`: an answer that is one JSON object may be a call."""
        self._functions = {function.name: function for function in functions}
        self._tools = [function.describe() for function in functions]
        self._form = form or ToolFormat()
        self._held = ""
        self._inside = False
        self._start_mark = self._end_mark = ""
        """Marks of the current call."""
        self._begun = not bare_calls
        """True once the answer's first visible characters are known."""
        self._whole = False
        """True if the answer may be one JSON object."""

    def push(self, text: str) -> list[Found]:
        """Return the text that certainly belongs to no call, and the completed calls."""
        self._held += text
        if not self._begun and not self._begin():
            return []
        if self._whole:
            return []
        found: list[Found] = []
        while (step := self._inside_call() if self._inside else self._before_call()) is not None:
            found += step
        return [part for part in found if part]

    def _inside_call(self) -> list[Found] | None:
        """Return the calls up to the end mark; None if it has not arrived."""
        if not self._end_mark:
            return None
        text, separator, after = self._held.partition(self._end_mark)
        if not separator:
            return None
        self._held, self._inside = after, False
        return list(self._parse(text)) or [self._start_mark + text + separator]

    def _before_call(self) -> list[Found] | None:
        """Release the text before a start mark and enter the call; None until more text arrives."""
        place = self._held.find(self._form.start)
        code = _CODE.search(self._held)
        if code is not None and not 0 <= place < code.start():
            before, self._held = self._held[: code.start()], self._held[code.start() :]
            if code[0] == self._held:  # the next text decides
                return [before] if before else None
            return [before, *self._enter(code[0], _CODE_END)]
        if place >= 0:
            before, self._held = self._held[:place], self._held[place:]
            return [before, *self._enter(self._form.start, self._form.end)]
        kept = overlap(self._held, self._form.start)
        certain = len(self._held) - kept
        before, self._held = self._held[:certain], self._held[certain:]
        return [before] if before else None

    def _enter(self, start: str, end: str) -> list[Found]:
        """Enter a call, after its start mark."""
        self._held = self._held[len(start) :]
        self._start_mark, self._end_mark, self._inside = start, end, True
        return []

    def end(self, *, cut_off: bool = False) -> list[Found]:
        """Return what was held back, once the text has ended; `cut_off`: by a limit."""
        held, self._held = self._held, ""
        if not self._inside and not self._whole:
            return [held] if held else []
        # A stop token may take the place of the end mark.
        if calls := self._parse(held, whole=not self._inside):
            return list(calls)
        if cut_off and (call := self._read_partial(held)):
            return [call]
        return [(self._start_mark if self._inside else "") + held]

    def _begin(self) -> bool:
        """Decide if the answer may be one JSON object; False while that is open."""
        start = self._held.lstrip()
        if not start or any(mark.startswith(start) and mark != start for mark in _WHOLE_JSON):
            return False
        self._begun = True
        self._whole = start.startswith(_WHOLE_JSON)
        return True

    def _parse(self, text: str, *, whole: bool = False) -> list[ParsedCall]:
        """Parse the calls in this text; none unless all of it is calls of known tools."""
        if whole:
            text = text.lstrip().removeprefix("<|python_tag|>")
        if not whole and self._end_mark == _CODE_END:
            found = _read_code(text)
        elif self._form.parse is not None and not whole:
            start = self._form.start if self._form.has_inner_name else ""
            found = self._run_parser(self._form.parse, start + text)
        elif text.lstrip().startswith("{"):
            found = _read_json(text)
        else:
            found = self._read_xml(text)
        if not all(name in self._functions for name, _ in found):
            return []
        return [_make_call(name, arguments) for name, arguments in found]

    def _run_parser(self, parse: Parser, text: str) -> list[tuple[str, Any]]:
        try:
            parsed = parse(text, self._tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            return [(str(call["name"]), call.get("arguments") or {}) for call in calls]
        # The parsers raise errors of any kind for a broken call, often with its text, which must
        # not be logged.
        except Exception as error:  # noqa: BLE001
            _log.info("a tool call cannot be parsed (%s)", type(error).__name__)
            return []

    def _read_xml(self, text: str) -> list[tuple[str, Any]]:
        function = _FUNCTION.search(text)
        if function is None:
            return []
        name, body = function[1].strip(), function[2]
        known = self._functions.get(name)
        schema = (known.parameters or {}).get("properties", {}) if known else {}
        pairs = ((found[1].strip(), found[2]) for found in _PARAMETER.finditer(body))
        return [(name, {key: _read_value(text, schema.get(key, {})) for key, text in pairs})]

    def _read_partial(self, text: str) -> ParsedCall | None:
        """Return the JSON call that a limit cut off, if its name is complete."""
        name = _JSON_NAME.search(text)
        if name is None or name[1] not in self._functions:
            return None
        arguments = _JSON_ARGUMENTS.search(text)
        partial = text[arguments.end() :].rstrip() if arguments else ""
        return ParsedCall(name[1], partial, new_call_id(), complete=False)


def _read_json(text: str) -> list[tuple[str, Any]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    arguments = value.get("arguments", value.get("parameters", {}))
    return [(str(value.get("name")), arguments)]


def _read_code(text: str) -> list[tuple[str, Any]]:
    """Return the calls of a code block: consecutive objects, or lists of objects."""
    decoder, calls, text = json.JSONDecoder(), [], text.removesuffix("```").strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        calls += value if isinstance(value, list) else [value]
        text = text[end:].lstrip()
    found = []
    for call in calls:
        if not isinstance(call, dict) or not {"arguments", "parameters"} & call.keys():
            return []
        found.append((str(call.get("name")), call.get("arguments", call.get("parameters"))))
    return found


def _make_call(name: str, arguments: Any) -> ParsedCall:
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False), new_call_id())


def _read_value(text: str, schema: Any) -> Any:
    """Convert a value: XML has only text, and the schema tells its type."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of the mark."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)
