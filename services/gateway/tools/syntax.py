"""The syntaxes of calls between marks or without any: JSON, Qwen-Coder's XML, Python.

JSON is an object with a name and arguments, also in doubled braces, as the chat template of
Qwen2.5-Coder shows it; arguments may be a string with JSON in it.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from services.gateway.tools.calls import ParsedCall, ToolFunction, new_call_id

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_XML = "<function="
_FIRST_KEY = re.compile(r'[\[{\s]*"(\w*)"\s*:\s*')
_BEFORE_KEY = re.compile(r'[\[{\s]*(?:"(\w*)(?:"\s*)?)?')
_KEYS = ("name", "type", "arguments", "parameters")
"""Keys with which a call in JSON may begin."""
_PYTHON_NAME = re.compile(r"[\w.-]*")
_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}
_DECODER = json.JSONDecoder(strict=False)
"""Accepts line breaks within strings: models write files that way."""
_LONGEST_PART = 8
"""An error so close to the end may be a literal or an escape that has not arrived completely."""


class CallSyntax:
    """Reads calls of these functions; anything else is no call."""

    def __init__(self, functions: Sequence[ToolFunction]) -> None:
        self._functions = {function.name: function for function in functions}

    def may_begin(self, text: str) -> bool:
        """Return True if this is the beginning of a call, as far as it goes."""
        if text[0] in "[{":
            return self._may_begin_json(text)
        if text.startswith(_XML) or _XML.startswith(text):
            return True
        found = _PYTHON_NAME.match(text)
        name = found[0] if found else ""
        if name == text:
            return self._begins_name(name)
        return name in self._functions and text[len(name) :].lstrip()[:1] in ("", "(")

    def _may_begin_json(self, text: str) -> bool:
        key = _FIRST_KEY.match(text)
        if key is None:
            begun = _BEFORE_KEY.fullmatch(text)
            return begun is not None and any(k.startswith(begun[1] or "") for k in _KEYS)
        value = text[key.end() :]
        if key[1] != "name" or not value:
            return key[1] in _KEYS
        name, quote, _ = value[1:].partition('"')
        return value[0] == '"' and (name in self._functions if quote else self._begins_name(name))

    def _begins_name(self, text: str) -> bool:
        return any(name.startswith(text) for name in self._functions)

    def read_json(
        self, text: str, *, marked: bool, ended: bool
    ) -> tuple[list[ParsedCall], int] | None:
        """Return the calls of the value at the beginning, and its length; None if it is open.

        Args:
            text: begins with a bracket or brace.
            marked: True within a model's own marks, where arguments may be left out.
            ended: True if nothing follows.

        Returns:
            No calls if the value is anything else, and length 0 if it is broken.
        """
        doubled = text.startswith("{{")
        try:
            value, end = _DECODER.raw_decode(text, int(doubled))
        except json.JSONDecodeError as error:
            unfinished = error.msg.startswith("Unterminated")
            is_open = unfinished or error.pos > len(text) - _LONGEST_PART
            return None if is_open else ([], 0)
        except (ValueError, RecursionError):
            return [], 0
        if doubled:
            if end == len(text) and not ended:
                return None
            end += text[end : end + 1] == "}"
        objects = value if isinstance(value, list) else [value]
        return self.make_calls(objects, marked=marked), end

    def make_calls(self, objects: Sequence[Any], *, marked: bool = True) -> list[ParsedCall]:
        """Return the calls that these describe; none unless each describes one."""
        calls = [self._read_object(value, marked=marked) for value in objects]
        return [call for call in calls if call] if all(calls) else []

    def _read_object(self, value: Any, *, marked: bool) -> ParsedCall | None:
        if not isinstance(value, dict) or not (
            marked or {"arguments", "parameters"} & value.keys()
        ):
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            arguments = _read_value(arguments, {})
        return self._make_call(value.get("name"), {} if arguments is None else arguments)

    def read_text(self, text: str) -> list[ParsedCall]:
        """Return the calls of a text that is nothing but XML or Python; none otherwise.

        Python is calls with literal arguments, or what JSON would be without single quotes.
        """
        if text.startswith(_XML):
            return self._read_xml(text)
        try:
            statements = ast.parse(text.strip()).body
            calls = [self._read_python(statement) for statement in statements]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
        return [call for call in calls if call] if all(calls) else []

    def _read_python(self, statement: ast.stmt) -> ParsedCall | None:
        """Return a call with literal arguments; raise ValueError for arguments of other kinds."""
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Dict):
            return self._read_object(_read_literal(call), marked=False)
        if not isinstance(call, ast.Call):
            return None
        name = ast.unparse(call.func)
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        keys = [*self._properties(name)][: len(call.args)]
        keys += [keyword.arg or "" for keyword in call.keywords]
        pairs = zip(keys, map(_read_literal, values), strict=True)
        return self._make_call(name, dict(pairs))

    def _read_xml(self, text: str) -> list[ParsedCall]:
        function = _FUNCTION.search(text)
        if function is None:
            return []
        name, body = function[1].strip(), function[2]
        schemas = self._properties(name)
        pairs = ((found[1].strip(), found[2]) for found in _PARAMETER.finditer(body))
        arguments = {key: _read_value(value, schemas.get(key, {})) for key, value in pairs}
        call = self._make_call(name, arguments)
        return [call] if call else []

    def _properties(self, name: str) -> dict[str, Any]:
        function = self._functions.get(name)
        properties: Any = ((function and function.parameters) or {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    def _make_call(self, name: Any, arguments: Any) -> ParsedCall | None:
        if name not in self._functions or not isinstance(arguments, dict):
            return None
        return ParsedCall(name, json.dumps(arguments, ensure_ascii=False), new_call_id())

    def read_partial(self, text: str) -> ParsedCall | None:
        """Return the JSON call that a limit cut off, if its name is complete."""
        name = _NAME.search(text)
        if name is None or name[1] not in self._functions:
            return None
        arguments = _ARGUMENTS.search(text)
        partial = text[arguments.end() :].rstrip() if arguments else ""
        return ParsedCall(name[1], partial, new_call_id(), complete=False)


def _read_literal(node: ast.expr) -> Any:
    """Return a value written in Python, or with JSON's constants."""
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and name.id in _CONSTANTS:
            name.id = _CONSTANTS[name.id]
    return ast.literal_eval(ast.unparse(node))


def _read_value(text: str, schema: Any) -> Any:
    """Convert a text: the schema tells its type, and it may be JSON."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
