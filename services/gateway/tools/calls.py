"""Functions that a model may call, and a parsed call."""

import json
import secrets
from typing import Any, NamedTuple

import msgspec

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
"""The marks of a call that a grammar forces, and the default marks of models without others."""


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; None allows any object."""
    freeform: bool = False
    """True if the client wants one plain text (argument `input`) instead of JSON."""
    namespace: str = ""
    """Separate for the client; here the name begins with it."""

    def describe(self) -> dict[str, Any]:
        """Return the function as chat templates expect it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}


class ParsedCall(NamedTuple):
    """A call that the model wrote."""

    name: str
    arguments: str
    """JSON, unless the answer was cut off within it."""
    id: str
    complete: bool = True
    """False if the answer ended within the call."""

    @property
    def value(self) -> dict[str, Any]:
        """The arguments as an object; for a truncated call, those that can be recovered."""
        text = self.arguments if self.complete else complete_json(self.arguments)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def new_call_id() -> str:
    """Return nine letters and digits: Mistral's templates accept no others."""
    return secrets.token_hex(5)[:9]


def complete_json(text: str) -> str:
    """Return a truncated JSON text with everything open in it closed."""
    closers: list[str] = []
    in_string = escaped = False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "[{":
            closers.append("]" if character == "[" else "}")
        elif character in "]}" and closers:
            closers.pop()
    if in_string:
        text = (text[:-1] if escaped else text) + '"'
    tail = "".join(reversed(closers))
    candidates = (text, text.rstrip().rstrip(","), text.rstrip().rstrip(":") + ":null")
    return next((c + tail for c in candidates if _is_json(c + tail)), "{}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
