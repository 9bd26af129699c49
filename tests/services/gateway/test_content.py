"""What clients repeat is shown to the model or named: no block and no item locks a conversation.

The published types are the source: a walk over their unions makes an instance of each, with the
required fields alone and with all of them, in which every text is a word of its own.
"""

import itertools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from anthropic.types import ContentBlockParam
from anthropic.types.beta import BetaContentBlockParam, BetaToolUnionParam
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionMessageParam,
    ChatCompletionToolUnionParam,
)
from openai.types.responses import ResponseInputItemParam, ToolParam

from protocol.messages import ChatMessage, Sampling
from services.gateway.body import to_header
from services.gateway.dialects.chat import parse_chat
from services.gateway.dialects.conversations import Conversations
from services.gateway.dialects.messages import parse_messages
from services.gateway.dialects.responses import parse_responses
from services.gateway.errors import ApiError
from services.gateway.task import Task

SILENT = re.compile(
    r"(.*_)?(id|ids|type|data|url|index|status|detail|signature|fingerprint)|encrypted_.*|role"
    r"|size|quality|background|output_format|action|moderation|format|model|phase|ttl|from_|to"
    r"|trigger|syntax|definition|environment|cache_control|citations|caller|annotations|logprobs"
    r"|mode|execution|effort|verbosity|summary_index|complexity|name|server_label|generate_summary"
    r"|safety_identifier|input_audio|created_by|prompt_cache_breakpoint|connector_id|code|namespace"
)
"""Fields in which there is nothing to read: ids, choices, bytes, what configures a provider."""


class Words:
    """Makes words, and remembers those that stand in fields worth reading."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.readable: dict[str, tuple[str, ...]] = {}
        """Each with the fields that it stands in."""

    def make(self, path: tuple[str, ...]) -> str:
        word = f"word{next(self._numbers)}end"
        if not any(SILENT.fullmatch(name) for name in path):
            self.readable[word] = path
        return word


def build(kind: Any, words: Words, path: tuple[str, ...] = (), *, full: bool) -> Any:
    """An instance of a published type."""
    origin = get_origin(kind)
    if hasattr(kind, "__required_keys__"):
        return build_dict(kind, words, path, full=full)
    inner = [option for option in get_args(kind) if option is not type(None)]
    if origin is Literal:
        return inner[0]
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        value = build(inner[0], words, path, full=full)
    elif origin in (typing.Union, types.UnionType):
        value = build(inner[-1 if full else 0], words, path, full=full)
    elif isinstance(origin, type) and not issubclass(origin, Mapping):
        value = [build(inner[0], words, path, full=full)]
    else:
        plain: dict[Any, Any] = {int: 3, float: 0.5, bool: True}
        value = words.make(path) if kind is str else plain.get(kind, {})
    return value


@cache
def read_hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def build_dict(kind: Any, words: Words, path: tuple[str, ...], *, full: bool) -> dict[str, Any]:
    hints = read_hints(kind)
    required = [name for name, hint in hints.items() if get_origin(hint) is typing.Required]
    names = hints if full and len(path) < 6 else required
    return {name: build(hints[name], words, (*path, name), full=full) for name in sorted(names)}


def flatten(kind: Any) -> Iterator[Any]:
    """The members of a union, of which some are unions themselves."""
    if get_origin(kind) is typing.Annotated:
        yield from flatten(get_args(kind)[0])
    elif get_origin(kind) in (typing.Union, types.UnionType):
        for option in get_args(kind):
            yield from flatten(option)
    else:
        yield kind


def read(door: str, body: dict[str, Any]) -> Task:
    data = msgspec.json.encode({"model": "large", **body})
    if door == "chat":
        return parse_chat(data, Sampling())[0]
    if door == "messages":
        return parse_messages(data, Sampling())
    return parse_responses(data, Sampling(), Conversations())[0]


def shown(task: Task) -> str:
    """All that the model sees."""
    functions = [function.describe() for function in task.functions]
    seen = msgspec.json.encode([*task.prompts[0].messages, functions]).decode()
    return seen + task.prompts[0].answer_start


LATER: list[Any] = [{"role": "user", "content": "and now?"}]


def ask_messages(block: Any, role: str) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [*LATER, {"role": role, "content": [block]}, *LATER]}


def ask_result(block: Any) -> dict[str, Any]:
    return ask_messages({"type": "tool_result", "tool_use_id": "a", "content": [block]}, "user")


def list_cases() -> Iterator[tuple[str, Any, Any]]:
    """A door, a type, and how an instance of it is asked."""
    for kind in {*flatten(BetaContentBlockParam), *flatten(ContentBlockParam)}:
        for role in ("user", "assistant"):
            yield "messages", kind, lambda block, role=role: ask_messages(block, role)
        yield "messages", kind, ask_result
    for kind in flatten(ResponseInputItemParam):
        yield "responses", kind, lambda item: {"input": [*LATER, item, *LATER]}
    for kind in flatten(ChatCompletionMessageParam):
        yield "chat", kind, lambda turn: {"messages": [*LATER, turn, *LATER]}
    for kind in flatten(ChatCompletionContentPartParam):
        yield (
            "chat",
            kind,
            lambda part: {"messages": [*LATER, {"role": "user", "content": [part]}, *LATER]},
        )


def test_every_block_and_item_is_shown_or_named() -> None:
    """Of all types, in all APIs: read, with all of its texts, or named as left out; no error."""
    faults: list[str] = []
    cases = list(list_cases())
    for (door, kind, ask), full in itertools.product(cases, (False, True)):
        words = Words()
        instance = build(kind, words, full=full)
        task = read(door, ask(instance))
        named, seen = to_header(task.unknown), shown(task)
        kind_name = instance.get("type")
        lost = [
            word
            for word, path in words.readable.items()
            if word not in seen and not any(f".{name}" in named for name in (*path, kind_name))
        ]
        if lost or seen.count("and now?") != 2:
            faults.append(f"{door} {instance}: {lost} are neither shown nor named ({named})")
    assert len(cases) > 100
    assert not faults, "\n".join(faults)


def test_every_tool_is_callable_or_named() -> None:
    """A tool of any type never ends a request."""
    doors: Sequence[tuple[str, Any, dict[str, Any]]] = (
        ("messages", BetaToolUnionParam, {"max_tokens": 5, "messages": LATER}),
        ("responses", ToolParam, {"input": "hello"}),
        ("chat", ChatCompletionToolUnionParam, {"messages": LATER}),
    )
    for door, union, body in doors:
        for kind, full in itertools.product(flatten(union), (False, True)):
            tool = build(kind, Words(), full=full)
            task = read(door, {**body, "tools": [tool]})
            assert task.functions or "tools[]." in to_header(task.unknown), tool


@pytest.mark.parametrize("door", ["chat", "messages", "responses"])
def test_a_picture_is_marked_where_it_was(door: str) -> None:
    """With text, and in earlier turns; alone in the message to be answered it is refused."""
    part: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"},
    }
    if door == "chat":
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
    if door == "responses":
        part = {"type": "input_image", "image_url": "data:image/png;base64,iVBO"}
    text = {"type": "input_text" if door == "responses" else "text", "text": "What is it?"}
    field = "input" if door == "responses" else "messages"
    task = read(door, {field: [{"role": "user", "content": [part, text]}], "max_tokens": 5})
    content = task.prompts[0].messages[0].content
    assert content == f"[{part['type']} left out: this model reads text only]\nWhat is it?"
    assert f"content[].{part['type']}" in to_header(task.unknown)
    with pytest.raises(Exception, match="images are not supported"):
        read(door, {field: [{"role": "user", "content": [part]}], "max_tokens": 5})
    read(door, {field: [{"role": "user", "content": [part]}, *LATER], "max_tokens": 5})


def test_documents_that_are_text_are_read() -> None:
    """As text, as blocks, and as the bytes of a text."""
    sources = [
        {"type": "text", "media_type": "text/plain", "data": "the words"},
        {"type": "content", "content": [{"type": "text", "text": "the words"}]},
        {"type": "base64", "media_type": "text/plain", "data": "dGhlIHdvcmRz"},
    ]
    for source in sources:
        task = read("messages", ask_messages({"type": "document", "source": source}, "user"))
        assert task.prompts[0].messages[1].content == "the words"
        assert not task.unknown


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "x", **fields}


THOUGHTS: list[dict[str, Any]] = [
    said(reasoning_content="hm"),
    said(reasoning="hm"),
    said(reasoning="hm", reasoning_details=[{"type": "reasoning.text", "text": "hm"}]),
    said(reasoning_details=[{"type": "reasoning.summary", "summary": "hm", "format": "a"}]),
    said(thinking_blocks=[{"type": "thinking", "thinking": "hm", "signature": "s"}]),
    said(reasoning_content=["h", {"text": "m"}]),
    said(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "x"]),
    said(content=[{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "x"}]),
]


def test_thoughts_are_known_by_the_names_of_all_servers() -> None:
    """Those of vLLM, mlx-lm, OpenRouter, LiteLLM and Mistral, alone or in several places."""
    for turn in THOUGHTS:
        task = read("chat", {"messages": [*LATER, turn, *LATER]})
        message = task.prompts[0].messages[1]
        assert (message.content, message.reasoning_content) == ("x", "hm"), turn
    sealed = said(reasoning_details=[{"type": "reasoning.encrypted", "data": "AAAA"}])
    task = read("chat", {"messages": [*LATER, sealed, *LATER]})
    assert to_header(task.unknown) == "messages[].reasoning_details"


ODD: list[tuple[str, Any, str]] = [
    ("chat", {"role": "tool", "tool_call_id": 7, "content": 42}, "42"),
    ("chat", {"role": "tool", "content": ["a", 1, None, True, {"k": "v"}]}, "k: v"),
    ("chat", {"role": "model", "content": "word", "name": 3}, "word"),
    ("chat", {"role": "ipython", "content": {"text": {"value": "word"}}}, "word"),
    ("chat", {"role": "USER", "content": [["word"]]}, "word"),
    ("chat", {"content": "word", "refusal": False}, "word"),
    (
        "chat",
        said(tool_calls=[{"id": 5, "function": {"name": "f", "arguments": ["word"]}}]),
        "word",
    ),
    ("chat", said(tool_calls={"function": {"name": "f", "arguments": {"a": "word"}}}), "word"),
    ("chat", said(tool_calls=[{"type": "mcp", "mcp": {"name": "f", "arguments": "word"}}]), "word"),
    ("chat", said(tool_calls=[{"name": "f", "arguments": {"a": "word"}}, "x"]), "word"),
    ("messages", {"role": "developer", "content": 5}, "5"),
    ("messages", {"role": "tool", "content": "word"}, "word"),
    ("messages", {"role": "user", "content": [None, 5, ["word"]]}, "word"),
    ("messages", said(content=[{"type": "text", "text": {"value": "word"}}]), "word"),
    ("messages", said(content=[{"type": "thinking", "thinking": ["word"]}]), "word"),
    ("responses", {"role": "critic", "content": "word"}, "word"),
    ("responses", {"role": "tool", "content": 5}, "5"),
    ("responses", ["word"], "word"),
    ("responses", {"role": "user", "content": [{"type": "input_text", "text": 5}]}, "5"),
]


def test_values_of_odd_types_do_not_lock_a_conversation() -> None:
    """A history holds what some server once accepted: it is shown, whatever its type."""
    for door, turn, word in ODD:
        field = "input" if door == "responses" else "messages"
        task = read(door, {field: [*LATER, turn, *LATER], "max_tokens": 5})
        assert word in shown(task), turn
        assert shown(task).count("and now?") == 2, turn


def test_items_are_known_by_their_ids() -> None:
    """A reference to an item of a stored response is that item; any other is named."""
    conversations = Conversations()
    output = {"type": "message", "id": f"msg_{'a' * 24}0", "role": "assistant", "content": "word"}
    conversations.keep(f"resp_{'a' * 24}", [], {"output": [output]})
    for reference in ({"type": "item_reference", "id": output["id"]}, {"id": output["id"]}):
        body = msgspec.json.encode({"input": [*LATER, reference, *LATER]})
        task, _ = parse_responses(body, Sampling(), conversations)
        assert task.prompts[0].messages[1] == ChatMessage("assistant", "word")
        assert not task.unknown
    for name in ("", "msg_", f"msg_{'a' * 24}1", f"msg_{'b' * 24}0"):
        body = msgspec.json.encode({"input": [*LATER, {"id": name}, *LATER]})
        task, _ = parse_responses(body, Sampling(), conversations)
        assert task.unknown == ["input[].item_reference"]
        assert len(task.prompts[0].messages) == 2


def test_a_begun_answer_keeps_its_thought() -> None:
    """With a text after it or alone; a message that calls something cannot go on."""
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    for parts, start in (([thought], ""), ([thought, {"type": "text", "text": "So"}], "So")):
        last = {"role": "assistant", "content": parts}
        for door in ("messages", "chat"):
            body = {"messages": [*LATER, last], "continue_final_message": True, "max_tokens": 5}
            [prompt] = read(door, body).prompts
            assert (prompt.answer_thought, prompt.answer_start) == ("hm", start)
    called = said(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
    with pytest.raises(ApiError, match="cannot be continued"):
        read("chat", {"messages": [*LATER, called], "continue_final_message": True})
