"""Calls are taken out of text, however it is cut into pieces; what is no call stays."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from protocol.decoding.grammar import Grammar, check_grammar
from protocol.errors import UsageError
from protocol.messages import ChatMessage
from services.gateway.answer_grammar import call_grammar
from services.gateway.template import ModelText
from services.gateway.tools.calls import (
    ParsedCall,
    ToolFunction,
    complete_json,
)
from services.gateway.tools.formats import ToolFormat, find_tool_format, load_parsers
from services.gateway.tools.generic import describe_tools
from services.gateway.tools.reader import Found, ToolReader
from services.gateway.tools.schemas import close_objects
from tests.services.gateway.scripted import write_template
from tests.support.tiny_models import EOS, tokenizer_json

FUNCTIONS = [
    ToolFunction(
        name="find",
        parameters={
            "type": "object",
            "properties": {"what": {"type": "string"}, "many": {"type": "integer"}},
        },
    ),
    ToolFunction(name="stop"),
]
HERMES = '<tool_call>\n{"name": "find", "arguments": {"what": "a < b", "many": 2}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=find>\n<parameter=what>\n12\n</parameter>\n"
    "<parameter=many>\n3\n</parameter>\n</function>\n</tool_call>"
)
CODED = '{\n  "name": "find",\n  "arguments": {"what": "a < b", "many": 2}\n}'
MIXED_LIST = f'```json\n[{CODED}, {{"name": "fly", "arguments": {{}}}}]\n```'
OTHER_CODE = (
    '```python\nx = {}\n```\nthen ```json\n{"name": "find"}\n``` or ```js\n{}\n```\n'
    "```json\n[1, 2]\n```"
)
MORE_PYTHON = "```python\nx = 1\nfind(what=x)\n```"
IN_DOCUMENT = f'{{"calls": [\n{CODED},\n{CODED}\n]}}'
FOUND = {"what": "a < b", "many": 2}
DEEP = f'<tool_call>{{"name": "stop", "arguments": {"[" * 100_000}</tool_call>'
CASES: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "text": ("no call at all", "no call at all", []),
    "hermes": (HERMES, "", [("find", FOUND)]),
    "text before": (f"Let me see. {HERMES}", "Let me see. ", [("find", FOUND)]),
    "two": (f"{HERMES}\n{HERMES}", "\n", [("find", FOUND), ("find", FOUND)]),
    "xml": (XML, "", [("find", {"what": "12", "many": 3})]),
    "cut off": (HERMES.removesuffix("</tool_call>"), "", [("find", FOUND)]),
    "code": (f"I look.\n```json\n{CODED}\n```\nDone", "I look.\n\nDone", [("find", FOUND)]),
    "code, two": (f"```json\n{CODED}\n{CODED}\n```", "", [("find", FOUND)] * 2),
    "code, list": (f"```json\n[{CODED}, {CODED}]\n```", "", [("find", FOUND)] * 2),
    "code, list with a tool that was not offered": (MIXED_LIST, MIXED_LIST, []),
    "code, cut off": (f"```json\n{CODED}", "", [("find", FOUND)]),
    "code, fence within": (
        '```json\n{"name": "stop", "arguments": {"a": "```"}}\n```',
        "",
        [("stop", {"a": "```"})],
    ),
    "code, other": (OTHER_CODE, OTHER_CODE, []),
    "code, then text": (f"```json\n{CODED}\nSo.\n```", "\nSo.\n```", [("find", FOUND)]),
    "code, no language": (f"```\n{CODED}```", "", [("find", FOUND)]),
    "code, python": (
        "```python\nfind('a < b', many=2)\nstop()\n```",
        "",
        [("find", FOUND), ("stop", {})],
    ),
    "code, python with more": (MORE_PYTHON, MORE_PYTHON, []),
    "python": ("find(what='a < b', many=2)", "", [("find", FOUND)]),
    "doubled braces": (f"<tool_call>\n{{{CODED}}}\n</tool_call>", "", [("find", FOUND)]),
    "doubled braces, bare": ('{{"name": "stop", "arguments": null}}', "", [("stop", {})]),
    "half doubled": ('{{"name": "stop", "arguments": {}}', "", [("stop", {})]),
    "arguments in a string": (
        '<tool_call>{"name": "find", "arguments": "{\\"many\\": 2}"}</tool_call>',
        "",
        [("find", {"many": 2})],
    ),
    "single quotes": (
        '```json\n{"name": "find", "arguments": {"many": null, "what": \'a "b" c\'}}\n```',
        "",
        [("find", {"many": None, "what": 'a "b" c'})],
    ),
    "two between marks": (
        f"<tool_call>\n{CODED}\n{CODED}\n</tool_call>",
        "",
        [("find", FOUND)] * 2,
    ),
    "line break in a string": (
        '{"name": "find", "arguments": {"what": "a\nb"}}',
        "",
        [("find", {"what": "a\nb"})],
    ),
    "other tags": (
        f"So:\n<tools>\n{CODED}\n</tools>\n<response>\n{CODED}\n</response>",
        "So:\n\n",
        [("find", FOUND)] * 2,
    ),
    "other tags, no call": ("<tools>\n\n</tools>", "<tools>\n\n</tools>", []),
    "on a line": (f"I look:\n\n{CODED}\nDone", "I look:\n\n\nDone", [("find", FOUND)]),
    "on lines": (f"{CODED}\n{CODED}", "", [("find", FOUND)] * 2),
    "in a document": (IN_DOCUMENT, IN_DOCUMENT, []),
    "in code": (f"```text\nsee\n{CODED}\n```", f"```text\nsee\n{CODED}\n```", []),
    "other name": ('{"name": "Ann", "arguments": {}}', '{"name": "Ann", "arguments": {}}', []),
    "llama": ('{"name": "stop", "parameters": {}}', "", [("stop", {})]),
    "json": ('{"colour": "red"}', '{"colour": "red"}', []),
    "unknown": (
        '<tool_call>{"name": "fly"}</tool_call>',
        '<tool_call>{"name": "fly"}</tool_call>',
        [],
    ),
    "broken": ("<tool_call>{oops</tool_call> x", "<tool_call>{oops</tool_call> x", []),
    "less than": ("a < b <tool", "a < b <tool", []),
    "deep": (DEEP, DEEP, []),
    "list": ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
}


def split(results: list[list[Found]]) -> tuple[str, list[ParsedCall]]:
    """All text, and all calls."""
    parts = [part for some in results for part in some]
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, ParsedCall)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@given(data=st.data())
def test_calls_are_read(case: tuple[str, str, list[tuple[str, Any]]], data: st.DataObject) -> None:
    """Text and calls are the same for every way of cutting."""
    text, content, calls = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = ToolReader(FUNCTIONS)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    results = [*[reader.push(piece) for piece in pieces], reader.end()]
    said, found = split(results)
    assert said == content
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert len({call.id for call in found}) == len(found)


def test_calls_come_as_soon_as_they_are_complete() -> None:
    """Each when its last brace is there, not when its block or its answer ends."""
    reader = ToolReader(FUNCTIONS)
    for text in (f"```json\n{CODED}", f"\n{CODED}", f"\n```\n<tool_call>{CODED}", f",{CODED}"):
        assert [type(part) for part in reader.push(text) if part != "\n"] == [ParsedCall]


def test_other_text_is_not_held_back() -> None:
    """JSON and code are given away at the first word that belongs to no call."""
    for text in ('```json\n{"colour', '{"name": "Ann', "```python\nprint(", "find me", "[1"):
        assert "".join(map(str, ToolReader(FUNCTIONS).push(text))) == text


MISTRAL = '[TOOL_CALLS]find[ARGS]{"what": "a < b", "many": 2}'
MISTRAL_LIST = (
    '[TOOL_CALLS] [{"name": "find", "arguments": {"many": 2, "what": "a < b"}}, '
    '{"name": "stop", "arguments": {}}]'
)
LFM = '<|tool_call_start|>[find(what="a < b", many=2), stop()]<|tool_call_end|>'
GLM = (
    "<tool_call>find\n<arg_key>what</arg_key>\n<arg_value>12</arg_value>\n"
    "<arg_key>many</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
    '<|tool_call_argument_begin|>{"what": "a < b", "many": 2}<|tool_call_end|>'
    "<|tool_calls_section_end|>"
)
FUNCTION_GEMMA = (
    "<start_function_call>call:find{what:<escape>a < b<escape>,many:2}<end_function_call>"
)
GEMMA = '<|tool_call>call:find{what:<|"|>a < b<|"|>,many:2}<tool_call|>'
KIMI_K3 = (
    '<|open|>tools<|sep|><|open|>call tool="find" index="1"<|sep|>'
    '<|open|>argument key="what" type="string"<|sep|>a < b<|close|>argument<|sep|>'
    '<|open|>argument key="many" type="integer"<|sep|>2<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)
LONGCAT = (
    "<longcat_tool_call>find\n<longcat_arg_key>what</longcat_arg_key>\n"
    "<longcat_arg_value>a < b</longcat_arg_value>\n<longcat_arg_key>many</longcat_arg_key>\n"
    "<longcat_arg_value>2</longcat_arg_value>\n</longcat_tool_call>"
)
MINICPM = (
    '<function name="find"><param name="what"><![CDATA[a < b]]></param>'
    '<param name="many">2</param></function>'
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="find">\n<parameter name="what">a < b</parameter>\n'
    '<parameter name="many">2</parameter>\n</invoke>\n<invoke name="stop">\n</invoke>\n'
    "</minimax:tool_call>"
)
MUSE = (
    '<atem:function_calls><atem:invoke name="find"><atem:parameter name="what">"a < b"'
    '</atem:parameter><atem:parameter name="many">2</atem:parameter></atem:invoke>'
    "</atem:function_calls>"
)
FORMATS: dict[str, tuple[str, str, str, list[tuple[str, Any]]]] = {
    "mistral": ("[TOOL_CALLS]", f"Well. {MISTRAL}", "Well. ", [("find", FOUND)]),
    "mistral list": ("[TOOL_CALLS]", MISTRAL_LIST, "", [("find", FOUND), ("stop", {})]),
    "mistral two": (
        "[TOOL_CALLS]", MISTRAL + "[TOOL_CALLS]stop[ARGS]{}", "", [("find", FOUND), ("stop", {})],
    ),
    "mistral cut off": ("[TOOL_CALLS]", MISTRAL[:-4], MISTRAL[:-4], []),
    "mistral unknown": ("[TOOL_CALLS]", "[TOOL_CALLS]fly[ARGS]{}", "[TOOL_CALLS]fly[ARGS]{}", []),
    "mistral text": ("[TOOL_CALLS]", "see [TOOL", "see [TOOL", []),
    "pythonic": ("<|tool_call_start|>", f"{LFM} so", " so", [("find", FOUND), ("stop", {})]),
    "glm": ("<tool_call> <arg_key>", GLM, "", [("find", {"what": "12", "many": 3})]),
    "kimi": ("<|tool_calls_section_begin|>", KIMI, "", [("find", FOUND)]),
    "hermes": ("<tool_call> tool_call.name", HERMES, "", [("find", FOUND)]),
    "function gemma": ("<start_function_call>", FUNCTION_GEMMA, "", [("find", FOUND)]),
    "gemma 4": ("<|tool_call><tool_call|>", f"So: {GEMMA}", "So: ", [("find", FOUND)]),
    "kimi k3": ("<|open|>tools<|sep|>", KIMI_K3, "", [("find", FOUND)]),
    "longcat": ("<longcat_tool_call>", LONGCAT, "", [("find", FOUND)]),
    "minicpm": ("<function name=", f"Now {MINICPM}", "Now ", [("find", FOUND)]),
    "minimax": ("<minimax:tool_call>", MINIMAX, "", [("find", FOUND), ("stop", {})]),
    "muse": ("<atem:function_calls>", MUSE, "", [("find", FOUND)]),
    "qwen coder": ("<tool_call>\\n<function=", XML, "", [("find", {"what": "12", "many": 3})]),
    "llama 3": (
        "<|python_tag|>", '<|python_tag|>{"name": "find", "parameters": {"what": "x"}}', "",
        [("find", {"what": "x"})],
    ),
}  # fmt: skip


def model_folder(folder: Path, template: str, **config: Any) -> Path:
    told = {"chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", FORMATS.values(), ids=FORMATS)
def test_formats_of_other_makers_are_read(
    tmp_path: Path, case: tuple[str, str, str, list[tuple[str, Any]]]
) -> None:
    """By mlx-lm's parsers, whichever the chat template asks for, however the text is cut."""
    template, text, content, calls = case
    form = find_tool_format(ModelText(model_folder(tmp_path, f"{{{{ '{template}' }}}}")))
    for size in (1, 3, 1000):
        reader = ToolReader(FUNCTIONS, form)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        results = [*[reader.push(piece) for piece in pieces], reader.end()]
        said, found = split(results)
        assert said == content
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls


def test_every_parser_of_mlx_lm_is_tried() -> None:
    """A parser that comes with a new mlx-lm needs a text here; laguna's is GLM's."""
    covered = {
        "function_gemma", "gemma4", "glm47", "json_tools", "kimi_k2", "kimi_k3", "laguna",
        "longcat", "minicpm5", "minimax_m2", "mistral", "muse_spark", "pythonic", "qwen3_coder",
    }  # fmt: skip
    assert set(load_parsers()) <= covered


def test_a_mark_may_be_a_token(tmp_path: Path) -> None:
    """Some conversions have the tokens of calls and do not name them in the template."""
    folder = write_template(tmp_path, "none", ["<|tool_call_start|>", "<|tool_call_end|>"])
    assert find_tool_format(ModelText(folder)).start == "<|tool_call_start|>"


CUT_OFF: dict[str, tuple[str, list[tuple[str, str, dict[str, Any]]]]] = {
    "in a text": (
        '<tool_call>\n{"name": "find", "arguments": {"what": "a b',
        [("find", '{"what": "a b', {"what": "a b"})],
    ),
    "before the arguments": ('<tool_call>{"name": "find"', [("find", "", {})]),
    "before the name": ('<tool_call>{"na', []),
    "of no known tool": ('<tool_call>{"name": "fly", "arguments": {', []),
    "whole JSON": (
        '{"name": "find", "parameters": {"many": 3, "wh',
        [("find", '{"many": 3, "wh', {"many": 3, "wh": None})],
    ),
}


@pytest.mark.parametrize("case", CUT_OFF.values(), ids=CUT_OFF)
def test_an_unfinished_call_is_a_call(
    case: tuple[str, list[tuple[str, str, dict[str, Any]]]],
) -> None:
    """Once its name is known; what can be made out of its arguments is an object."""
    text, expected = case
    reader = ToolReader(FUNCTIONS)
    said, calls = split([reader.push(text), reader.end(cut_off=True)])
    assert [(call.name, call.arguments, call.value) for call in calls] == expected
    assert not any(call.complete for call in calls)
    assert said == ("" if expected else text)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    share=st.floats(0, 1),
)
def test_json_that_breaks_off_is_completed(value: Any, share: float) -> None:
    """Whatever is left of it; all of it stays as it is."""
    text = json.dumps({"a": value})
    assert complete_json(text) == text
    assert isinstance(json.loads(complete_json(text[: int(share * len(text))])), dict)


OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (OPEN, {**OPEN, "additionalProperties": False}),
        ({**OPEN, "additionalProperties": True}, {**OPEN, "additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        ({"anyOf": [OPEN]}, {"anyOf": [{**OPEN, "additionalProperties": False}]}),
        ({"allOf": [OPEN]}, {"allOf": [OPEN]}),
        ({"const": OPEN}, {"const": OPEN}),
        (
            {"$defs": {"properties": OPEN}},
            {"$defs": {"properties": {**OPEN, "additionalProperties": False}}},
        ),
    ],
)
def test_objects_are_closed(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    """Unless they say otherwise: a model that may invent properties does not stop."""
    assert close_objects(schema) == closed


def test_a_forced_call_without_parameters_has_none(tmp_path: Path) -> None:
    """However a tool says that it takes none, the grammar allows `{}` and nothing else."""
    closed = {"properties": {}, "required": [], "additionalProperties": False}
    wishes: list[Any] = [None, {}, {"type": "object"}, {"type": "object", "properties": {}}, closed]
    grammars = {call_grammar([ToolFunction(name="a", parameters=wish)]) for wish in wishes}
    [grammar] = grammars
    begun = '<tool_call>\n{"name": "a", "arguments": {'
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    state = Grammar.start(grammar, tmp_path, [EOS])
    tokenizer: Any = Tokenizer.from_str(tokenizer_json())
    for token in tokenizer.encode(begun, add_special_tokens=False).ids:
        assert state.advance(token)
    allowed = [tokenizer.decode([int(token)]) for token in np.flatnonzero(state.compute_mask())]
    assert {text.strip()[:1] for text in allowed} == {"}", ""}
    free = {"type": "object", "additionalProperties": True}
    assert call_grammar([ToolFunction(name="a", parameters=free)]) != grammar


def test_references_in_parameters_hold(tmp_path: Path) -> None:
    """To definitions and to the whole schema, for each of several functions; data stays data."""
    node = {"type": "object", "properties": {"next": {"$ref": "#"}, "kind": {"$ref": "#/$defs/K"}}}
    first = {**node, "$defs": {"K": {"enum": ["x", {"$ref": "#"}]}}, "required": ["kind"]}
    second = {**node, "$defs": {"K": {"enum": ["y"]}}, "required": ["kind"]}
    functions = [
        ToolFunction(name=name, parameters=wish) for name, wish in (("a", first), ("b", second))
    ]
    grammar = call_grammar(functions)
    check_grammar(grammar)
    assert '{"$ref": "#"}' in grammar
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    tokenizer: Any = Tokenizer.from_str(tokenizer_json())
    for kind, fits in (("y", True), ("x", False)):
        state = Grammar.start(grammar, tmp_path, [EOS])
        text = f'<tool_call>\n{{"name": "b", "arguments": {{"next": {{"kind": "{kind}"'
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        assert all(state.advance(token) for token in tokens) is fits


def test_arguments_are_an_object_whatever_a_schema_says() -> None:
    """Keywords that a grammar cannot express are not enforced; types that exclude it are."""
    one = {"type": "object", "properties": {"a": {"type": "string"}}}
    same: dict[str, Any] = {"type": "array", "uniqueItems": True}
    for schema in (
        {"anyOf": [one, {"type": "integer"}]},
        {**one, "not": {"required": ["b"]}},
        {**one, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"type": ["object", "null"], "properties": {"a": same}},
        {"oneOf": [one, {**one, "maxProperties": 1}]},
    ):
        grammar = call_grammar([ToolFunction(name="f", parameters=schema)])
        check_grammar(grammar)
        assert '"type": "object"' in grammar
    with pytest.raises(UsageError, match="arguments"):
        check_grammar(call_grammar([ToolFunction(name="f", parameters={"enum": ["text"]})]))


def test_a_template_without_tools_gets_them_as_text() -> None:
    """The functions stand in the system message, earlier calls and results in the turns."""
    call = {"type": "function", "id": "1", "function": {"name": "stop", "arguments": {"a": 1}}}
    first, user, assistant, result = describe_tools(
        [
            ChatMessage("system", "Be brief."),
            ChatMessage("user", "go"),
            ChatMessage("assistant", "", tool_calls=[call]),
            ChatMessage("tool", "done", tool_call_id="1"),
            ChatMessage("user", "and?"),
        ],
        FUNCTIONS,
    )
    assert first.content.startswith("Be brief.")
    assert '{"name": "find", "description": ""' in first.content
    assert '{"name": "function-name", "arguments": {...}}' in first.content
    assert user == ChatMessage("user", "go")
    reader = ToolReader(FUNCTIONS)
    _, [parsed] = split([reader.push(assistant.content), reader.end()])
    assert (parsed.name, parsed.value) == ("stop", {"a": 1})
    assert result == ChatMessage("user", "<tool_response>\ndone\n</tool_response>\n\nand?")


def test_the_model_may_name_its_parser(tmp_path: Path) -> None:
    """What it names wins; a name that nobody knows does not, nor does a broken file."""
    folder = model_folder(tmp_path, "[TOOL_CALLS]", tool_parser_type="function_gemma")
    assert find_tool_format(ModelText(folder)).start == "<start_function_call>"
    folder = model_folder(tmp_path, "[TOOL_CALLS]", tool_parser_type="nobody's")
    assert (find_tool_format(ModelText(folder)).start, find_tool_format(ModelText(folder)).end) == (
        "[TOOL_CALLS]",
        "",
    )
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    assert find_tool_format(ModelText(folder)) == ToolFormat()


def test_parsers_come_without_mlx(tmp_path: Path) -> None:
    """The gateway's process does not load what it does not compute with."""
    program = (
        "import sys; from pathlib import Path; import services.gateway.app;"
        "from services.gateway.tools.formats import find_tool_format as f;"
        "from services.gateway.template import ModelText as M;"
        "assert f(M(Path(sys.argv[1]))).parse;"
        "assert not {'mlx', 'mlx_lm', 'transformers'} & set(sys.modules)"
    )
    folder = model_folder(tmp_path, "[TOOL_CALLS]")
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, timeout=120)
