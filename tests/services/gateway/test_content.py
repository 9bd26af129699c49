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

from protocol.messages import Sampling
from services.gateway.body import to_header
from services.gateway.dialects.chat import parse_chat
from services.gateway.dialects.conversations import Conversations
from services.gateway.dialects.messages import parse_messages
from services.gateway.dialects.responses import parse_responses
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
