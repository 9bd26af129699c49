"""Calls are taken out of text, however it is cut into pieces; what is no call stays."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.template import ModelText
from services.gateway.tools.calls import ParsedCall, ToolFunction
from services.gateway.tools.formats import ToolFormat, find_tool_format
from services.gateway.tools.reader import Found, ToolReader

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
FOUND = {"what": "a < b", "many": 2}
DEEP = f'<tool_call>{{"name": "stop", "arguments": {"[" * 100_000}</tool_call>'
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
