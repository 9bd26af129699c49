"""Tools: what is put into the prompt, what an answer must look like, what was called.

A call stands between the marks of the model's `find_tool_format`. Between <tool_call> and
</tool_call> it is JSON (Hermes, Qwen) or XML (Qwen-Coder); other marks have mlx-lm's parsers.
Or the whole answer is one JSON object that names a tool (Llama 3). What looks like a call but
is none stays text: nothing that the model said is lost.
"""

import json
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from protocol.decoding.grammar import json_rule
from services.gateway.schema import ToolFunction
from services.gateway.tool_format import ToolFormat

_START, _END, _ = ToolFormat()
_log = logging.getLogger(__name__)

Parser = Callable[[str, list[dict[str, Any]]], Any]

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class ParsedCall(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: str
    """JSON."""
    id: str

    def body(self) -> dict[str, Any]:
        """As OpenAI has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def call_grammar(functions: Sequence[ToolFunction]) -> str:
    """The grammar of an answer that must call one of these."""
    kinds = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    call = json_rule({"anyOf": kinds})
    return f'start: "{_START}\\n" call "\\n{_END}"\ncall: {call}'


class ToolReader:
    """Takes calls out of a text that comes in pieces."""

    def __init__(self, functions: Sequence[ToolFunction], form: ToolFormat | None = None) -> None:
        self._functions = {function.name: function for function in functions}
        self._form = form or ToolFormat()
        self._held = ""
        self._inside = False
        self._begun = False
        """Whether the answer's first visible character is known."""
        self._whole = False
        """Whether the answer may be one JSON object."""

    def push(self, text: str) -> tuple[str, list[ParsedCall]]:
        """The text that is certainly no call, and the calls that are complete."""
        self._held += text
        if not self._begun and self._held.strip():
            self._begun = True
            self._whole = self._held.lstrip().startswith("{")
        if self._whole:
            return "", []
        content, calls = "", list[ParsedCall]()
        while marker := self._form.end if self._inside else self._form.start:
            before, found, after = self._held.partition(marker)
            if not found:
                break
            self._held = after
            if self._inside:
                called = self._parsed(before)
                calls += called
                content += "" if called else self._form.start + before + marker
            else:
                content += before
            self._inside = not self._inside
        if not self._inside:
            certain = len(self._held) - _overlap(self._held, self._form.start)
            content, self._held = content + self._held[:certain], self._held[certain:]
        return content, calls

    def end(self) -> tuple[str, list[ParsedCall]]:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        if not self._inside and not self._whole:
            return held, []
        # A stop token may stand for the end marker.
        called = self._parsed(held, whole=not self._inside)
        if called:
            return "", called
        return (self._form.start if self._inside else "") + held, []

    def _parsed(self, text: str, *, whole: bool = False) -> list[ParsedCall]:
        """The calls in this text; none if it is not all calls of known tools."""
        if self._form.parse is not None and not whole:
            found = self._by_parser(self._form.parse, text)
        elif text.lstrip().startswith("{"):
            found = self._from_json(text)
        else:
            found = self._from_xml(text)
        if not all(name in self._functions for name, _ in found):
            return []
        return [_call(name, arguments) for name, arguments in found]

    def _by_parser(self, parse: Parser, text: str) -> list[tuple[str, Any]]:
        tools = [
            {"type": "function", "function": {"name": f.name, "parameters": f.parameters or {}}}
            for f in self._functions.values()
        ]
        try:
            parsed = parse(text, tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            return [(str(call["name"]), call.get("arguments") or {}) for call in calls]
        # The parsers raise whatever a broken call leads them into, often with its text, which
        # does not belong into a log.
        except Exception as error:  # noqa: BLE001
            _log.info("a call of a tool cannot be read (%s)", type(error).__name__)
            return []

    @staticmethod
    def _from_json(text: str) -> list[tuple[str, Any]]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        arguments = value.get("arguments", value.get("parameters", {}))
        return [(str(value.get("name")), arguments)]

    def _from_xml(self, text: str) -> list[tuple[str, Any]]:
        function = _FUNCTION.search(text)
        if function is None:
            return []
        name, body = function[1].strip(), function[2]
        known = self._functions.get(name)
        schema = (known.parameters or {}).get("properties", {}) if known else {}
        pairs = ((found[1].strip(), found[2]) for found in _PARAMETER.finditer(body))
        return [(name, {key: _value(text, schema.get(key, {})) for key, text in pairs})]


def _call(name: str, arguments: Any) -> ParsedCall:
    # Mistral's templates take ids of nine letters and digits, and no others.
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False), secrets.token_hex(5)[:9])


def _value(text: str, schema: dict[str, Any]) -> Any:
    """XML has only text; the schema says what it stands for."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _overlap(text: str, marker: str) -> int:
    """Length of the longest ending of `text` that begins the marker."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((n for n in lengths if marker.startswith(text[-n:])), 0)
