"""Schemas of a forced call's arguments."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from protocol.decoding.grammar import Grammar, check_grammar
from services.gateway.answer_grammar import call_grammar
from services.gateway.tools.calls import ToolFunction
from tests.support.tiny_models import EOS, tokenizer_json

LEFT_OUT: list[Any] = [
    *(
        {"pattern": text}
        for text in ("^(?=a)", "^(?!a)", "(?<=a)b", r"(a)\1", r"\ba", "(", "(?>a)")
    ),
    *({"type": kind} for kind in ("STRING", "any", "dict", ["string", "date"], [], None, 3, {})),
    *({"$ref": place} for place in ("https://example.com/x.json", "#/$defs/none", "#here", 3)),
    *({"minLength": count} for count in (-1, 1.5, "1", None, True)),
    {"type": "string", "maxLength": 10**12},
    *({"type": "array", "items": part} for part in ("string", None)),
    {"type": "array", "prefixItems": {"type": "string"}},
    *({"type": "integer", "minimum": least} for least in ("0", None, -(10**30))),
    *({"type": "number", "multipleOf": factor} for factor in (0, -1, 1e-20, "1")),
    *({"enum": values} for values in ([], "text", None)),
    {"type": "string", "format": None},
    *({"patternProperties": patterns} for patterns in ({"^(?!a)": {}}, [])),
    *({"properties": names} for names in (["a"], None, {"a": "string"}, {"a": None})),
    *({"properties": {"a": {}}, "required": names} for names in ("a", None, [3], ["z"])),
    *({"type": "object", "additionalProperties": part} for part in ("no", None)),
    *({"anyOf": parts} for parts in ([], {}, None, ["string"])),
    {"properties": {"properties": False, "const": {"$ref": "#/none"}}},
    {"$id": "::"},
    {"$schema": "none"},
]


def test_what_a_grammar_cannot_express_is_left_out() -> None:
    """A tool's schema has been written for other programs, and checks itself what it must."""
    for part in LEFT_OUT:
        parameters = {"type": "object", "properties": {"a": part}, "required": ["a"]}
        for schema in (parameters, part):
            check_grammar(call_grammar([ToolFunction(name="f", parameters=schema)]))


@pytest.mark.parametrize(
    ("text", "fits"),
    [('{"a": "xy", "b": 3}', True), ('{"a": "x', True), ('{"a": 3', False), ('{"b": "x', False)],
)
def test_the_other_keywords_hold(tmp_path: Path, text: str, fits: bool) -> None:  # noqa: FBT001
    """Also those of the same schema and of its definitions."""
    schema = {
        "properties": {
            "a": {"type": "string", "pattern": "^(?=x)", "title": "A"},
            "b": {"$ref": "#/$defs/B~1%62", "description": "B"},
        },
        "required": ["a", "z"],
        "$defs": {"B/b": {"type": "integer", "minimum": "0"}},
    }
    grammar = call_grammar([ToolFunction(name="f", parameters=schema)])
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    tokenizer: Any = Tokenizer.from_str(tokenizer_json())
    state = Grammar.start(grammar, tmp_path, [EOS])
    call = f'<tool_call>\n{{"name": "f", "arguments": {text}'
    tokens = tokenizer.encode(call, add_special_tokens=False).ids
    assert all(state.advance(token) for token in tokens) is fits


def test_a_deep_schema_takes_no_longer_than_it_is_long() -> None:
    """Each part is looked at once, whatever it is in."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}}
    check_grammar(call_grammar([ToolFunction(name="f", parameters=schema)]))
