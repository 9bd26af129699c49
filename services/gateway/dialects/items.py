"""The items of OpenAI's Responses API: turns of a conversation, and tools in namespaces."""

from typing import Any

import msgspec
from msgspec.structs import replace

from protocol.messages import ChatMessage
from services.gateway.body import check_free_form, to_field_error
from services.gateway.dialects.blocks import is_opaque, to_text
from services.gateway.dialects.content import (
    Part,
    join_text,
    name_unknown,
    read_role,
    read_thought,
)
from services.gateway.dialects.openai import Fields, FunctionName, describe_call
from services.gateway.tools.calls import ToolFunction

CALL_PREFIX = "call_"
TOOL_ITEMS = ("additional_tools", "tool_search_output")
"""Items that add tools."""
_REFERENCE = "item_reference"
_EXTERNAL = ("mcp_list_tools", _REFERENCE)
"""Items that refer to tools and items of another server."""

_KNOWN = {
    "message": {"type", "id", "status", "role", "content"},
    "reasoning": {"type", "id", "status", "content", "summary"},
}
_NAMES = ("name", "namespace", "server_label")
_OUTPUTS = ("output", "outputs", "result", "results", "error")
"""Fields that hold the result of a call."""


class ResponsesTool(Fields, frozen=True, kw_only=True):
    """A tool; functions and custom tools are supported, alone or in a namespace."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)


def add_item(messages: list[ChatMessage], item: Part, unknown: list[str]) -> None:
    """Add an item; consecutive thoughts, texts and calls of the assistant form one message.

    Raises:
        ApiError: a field has an impossible type.
    """
    for message in _read_item(item, unknown):
        last = messages[-1] if messages else None
        if last is not None and last.role == message.role == "assistant":
            messages[-1] = _join_turns(last, message)
        else:
            messages.append(message)


def _read_item(item: Part, unknown: list[str]) -> list[ChatMessage]:
    """Return the messages of an item of any type; dropped parts are recorded."""
    check_free_form(item, "input")
    kind = str(item.get("type") or ("message" if {"role", "content"} & item.keys() else _REFERENCE))
    if known := _KNOWN.get(kind):
        name_unknown(item, known, unknown, "input[]")
    if kind == "message":
        return [_read_message(item, unknown)]
    if kind == "reasoning":
        content, summary = item.get("content"), item.get("summary")
        if content and summary:
            unknown.append("input[].summary")
        thought = read_thought(content or summary)
        return [ChatMessage("assistant", "", reasoning_content=thought)] if thought else []
    if kind in TOOL_ITEMS or kind in _EXTERNAL:
        return _read_tool_item(item, kind, unknown)
    if kind.endswith("_output"):
        return [_read_output(item, item, unknown)]
    if kind.endswith("_call") or kind in ("program", "mcp_approval_request"):
        return _read_call(item, kind.removesuffix("_call"), unknown)
    text = to_text(item, unknown, "input[]")
    return [ChatMessage("user", text)] if text else []


def _read_message(item: Part, unknown: list[str]) -> ChatMessage:
    content = join_text(item.get("content"), unknown, "input[].content[]")
    return ChatMessage(read_role(item.get("role"), "input[]"), content)


def _read_tool_item(item: Part, kind: str, unknown: list[str]) -> list[ChatMessage]:
    """Return the messages of an item with tools: none, unless a search found the tools."""
    if kind in _EXTERNAL:
        unknown.append(f"input[].{kind}")
    if kind != "tool_search_output":
        return []
    tools = item.get("tools")
    names = [str(t.get("name")) for t in tools if isinstance(t, dict)] if tools else []
    return [ChatMessage("tool", "\n".join(names), tool_call_id=_call_id(item))]


def _read_call(item: Part, kind: str, unknown: list[str]) -> list[ChatMessage]:
    """Return the call of any tool; one that ran elsewhere includes its result."""
    name = join_name(item.get("namespace") or item.get("server_label"), item.get("name") or kind)
    rest = {
        field: value
        for field, value in item.items()
        if not is_opaque(field) and field not in (*_NAMES, *_OUTPUTS) and value is not None
    }
    arguments = rest.get("arguments", next(iter(rest.values())) if len(rest) == 1 else rest)
    if "input" in item:
        arguments = {"input": item["input"]}
    call = describe_call(_call_id(item), name, arguments)
    messages = [ChatMessage("assistant", "", tool_calls=[call])]
    outputs = {field: item[field] for field in _OUTPUTS if item.get(field) is not None}
    if outputs:
        messages.append(_read_output(item, outputs, unknown))
    return messages


def _read_output(item: Part, outputs: Part, unknown: list[str]) -> ChatMessage:
    """Return the result of a call, whose id is in the item."""
    shown = {
        field: value
        for field, value in outputs.items()
        if not is_opaque(field) and field not in _NAMES and value is not None
    }
    output = shown.get("output")
    if len(shown) == 1 and isinstance(output, str | list):
        text = join_text(output, unknown, "input[].output[]", "\n")
    else:
        text = to_text(shown, unknown, "input[]")
    return ChatMessage("tool", text, tool_call_id=_call_id(item))


def _call_id(item: Part) -> str:
    return str(item.get("call_id") or item.get("id") or "").removeprefix(CALL_PREFIX)


def _join_turns(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    return replace(
        first,
        content=first.content + second.content,
        tool_calls=[*first.tool_calls, *second.tool_calls],
        reasoning_content=first.reasoning_content + second.reasoning_content,
    )


def join_name(namespace: Any, name: Any) -> str:
    """Return the name by which the model knows a tool of a namespace."""
    if not namespace:
        return str(name or "")
    return f"{namespace}{'' if str(namespace).endswith('__') else '__'}{name or ''}"


def read_tools(tools: list[dict[str, Any]], unknown: list[str]) -> list[ToolFunction]:
    """Return the tools that the client runs; those of OpenAI's servers are recorded as dropped."""
    functions: dict[str, ToolFunction] = {}
    for fields in tools:
        check_free_form(fields, "tools")
        for namespace, tool in _open_namespace(_convert(fields)):
            if function := _read_tool(tool, namespace):
                functions[function.name] = function
            else:
                unknown.append(f"tools[].{tool.type}")
    return list(functions.values())


def _open_namespace(tool: ResponsesTool) -> list[tuple[str, ResponsesTool]]:
    """Expand a namespace into its tools, each with the namespace."""
    if tool.type != "namespace":
        return [("", tool)]
    return [(tool.name or "", _convert(fields)) for fields in tool.tools]


def _convert(fields: dict[str, Any]) -> ResponsesTool:
    if isinstance(fields.get("function"), dict):  # the form of the chat API
        fields = {**fields, **fields["function"]}
    try:
        return msgspec.convert(fields, ResponsesTool)
    except msgspec.ValidationError as error:
        raise to_field_error(error) from error


def _read_tool(tool: ResponsesTool, namespace: str) -> ToolFunction | None:
    """Return a callable tool; None for those of OpenAI's servers."""
    parameters = tool.parameters
    if tool.type == "custom":
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        }
    elif tool.type != "function":
        return None
    if not tool.name:
        return None
    return ToolFunction(
        name=join_name(namespace, tool.name),
        description=tool.description or "",
        parameters=parameters,
        freeform=tool.type == "custom",
        namespace=namespace,
    )
