"""Calls are taken out of text, however it is cut into pieces; what is no call stays."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.fields import Function
from services.gateway.tools import ToolReader

FUNCTIONS = [
    Function(
        name="find",
        parameters={
            "type": "object",
            "properties": {"what": {"type": "string"}, "many": {"type": "integer"}},
        },
    ),
    Function(name="stop"),
]
HERMES = '<tool_call>\n{"name": "find", "arguments": {"what": "a < b", "many": 2}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=find>\n<parameter=what>\n12\n</parameter>\n"
    "<parameter=many>\n3\n</parameter>\n</function>\n</tool_call>"
)
FOUND = {"what": "a < b", "many": 2}
CASES: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "text": ("no call at all", "no call at all", []),
    "hermes": (HERMES, "", [("find", FOUND)]),
    "text before": (f"Let me see. {HERMES}", "Let me see. ", [("find", FOUND)]),
    "two": (f"{HERMES}\n{HERMES}", "\n", [("find", FOUND), ("find", FOUND)]),
    "xml": (XML, "", [("find", {"what": "12", "many": 3})]),
    "cut off": (HERMES.removesuffix("</tool_call>"), "", [("find", FOUND)]),
    "llama": ('{"name": "stop", "parameters": {}}', "", [("stop", {})]),
    "json": ('{"colour": "red"}', '{"colour": "red"}', []),
    "unknown": (
        '<tool_call>{"name": "fly"}</tool_call>',
        '<tool_call>{"name": "fly"}</tool_call>',
        [],
    ),
    "broken": ("<tool_call>{oops</tool_call> x", "<tool_call>{oops</tool_call> x", []),
    "less than": ("a < b <tool", "a < b <tool", []),
    "list": ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@given(data=st.data())
def test_calls_are_read(case: tuple[str, str, list[tuple[str, Any]]], data: st.DataObject) -> None:
    """Text and calls are the same for every way of cutting."""
    text, content, calls = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = ToolReader(FUNCTIONS)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    results = [*[reader.push(piece) for piece in pieces], reader.end()]
    assert "".join(said for said, _ in results) == content
    found = [call for _, some in results for call in some]
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert len({call.id for call in found}) == len(found)
