"""Tools: what is put into the prompt, what an answer must look like, what was called.

A call stands between <tool_call> and </tool_call>, as JSON (Hermes, Qwen) or as XML
(Qwen-Coder), or the whole answer is one JSON object that names a tool (Llama 3). What looks
like a call but is none stays text: nothing that the model said is lost.
"""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from protocol.grammar import json_rule
from services.gateway.fields import Function

_START = "<tool_call>"
_END = "</tool_call>"
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Call(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: str
    """JSON."""
    id: str

    def body(self) -> dict[str, Any]:
        """As OpenAI has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def call_grammar(functions: Sequence[Function]) -> str:
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

    def __init__(self, functions: Sequence[Function]) -> None:
        self._functions = {function.name: function for function in functions}
        self._held = ""
        self._inside = False
        self._begun = False
        """Whether the answer's first visible character is known."""
        self._whole = False
        """Whether the answer may be one JSON object."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """The text that is certainly no call, and the calls that are complete."""
        self._held += text
        if not self._begun and self._held.strip():
            self._begun = True
            self._whole = self._held.lstrip().startswith("{")
        if self._whole:
            return "", []
        content, calls = "", list[Call]()
        while True:
            marker = _END if self._inside else _START
            before, found, after = self._held.partition(marker)
            if not found:
                break
            self._held = after
            if self._inside:
                call = self._parsed(before)
                calls += [call] if call else []
                content += "" if call else _START + before + _END
            else:
                content += before
            self._inside = not self._inside
        if not self._inside:
            certain = len(self._held) - _overlap(self._held, _START)
            content, self._held = content + self._held[:certain], self._held[certain:]
        return content, calls

    def end(self) -> tuple[str, list[Call]]:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        if not self._inside and not self._whole:
            return held, []
        call = self._parsed(held)  # a stop token may stand for the end marker
        if call:
            return "", [call]
        return (_START if self._inside else "") + held, []

    def _parsed(self, text: str) -> Call | None:
        found = self._from_json(text) if text.lstrip().startswith("{") else self._from_xml(text)
        if found is None or found[0] not in self._functions:
            return None
        name, arguments = found
        return Call(name, json.dumps(arguments, ensure_ascii=False), f"call_{secrets.token_hex(8)}")

    @staticmethod
    def _from_json(text: str) -> tuple[str, Any] | None:
        try:
            value = json.loads(text)
        except ValueError:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        return str(value.get("name")), arguments

    def _from_xml(self, text: str) -> tuple[str, Any] | None:
        function = _FUNCTION.search(text)
        if function is None:
            return None
        name, body = function[1].strip(), function[2]
        known = self._functions.get(name)
        schema = (known.parameters or {}).get("properties", {}) if known else {}
        pairs = ((found[1].strip(), found[2]) for found in _PARAMETER.finditer(body))
        return name, {key: _value(text, schema.get(key, {})) for key, text in pairs}


def _value(text: str, schema: dict[str, Any]) -> Any:
    """XML has only text; the schema says what it stands for."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _overlap(text: str, marker: str) -> int:
    """Length of the longest ending of `text` that begins the marker."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((n for n in lengths if marker.startswith(text[-n:])), 0)
