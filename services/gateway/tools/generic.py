"""Tools for models whose chat template has none: described in the system message.

Calls and their results are written into the conversation as text, in the format that most models
have seen in training (Hermes): JSON between <tool_call> marks.
"""

import json
from collections.abc import Sequence

from msgspec.structs import replace

from protocol.messages import ChatMessage
from services.gateway.tools.calls import CALL_END, CALL_START, ToolFunction

_INSTRUCTIONS = (
    "You can call functions. Their signatures, one JSON object a line:\n{functions}\n\n"
    "To call a function, write a JSON object with its name and arguments between marks:\n"
    f'{CALL_START}\n{{{{"name": "function-name", "arguments": {{{{...}}}}}}}}\n{CALL_END}\n'
    "The results come in the next message. Without need of a function, answer in plain words."
)


def describe_tools(
    messages: Sequence[ChatMessage], functions: Sequence[ToolFunction]
) -> list[ChatMessage]:
    """Return the conversation as text only: functions, earlier calls and their results included."""
    plain = join_turns([_flatten(message) for message in messages])
    if not functions:
        return plain
    lines = "\n".join(json.dumps(f.describe()["function"], ensure_ascii=False) for f in functions)
    instructions = _INSTRUCTIONS.format(functions=lines)
    if plain and plain[0].role == "system":
        first = replace(plain[0], content=f"{plain[0].content}\n\n{instructions}")
        return [first, *plain[1:]]
    return [ChatMessage("system", instructions), *plain]


def join_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Merge adjacent user messages: many templates require alternating roles."""
    joined: list[ChatMessage] = []
    for message in messages:
        if joined and message.role == joined[-1].role == "user":
            content = f"{joined[-1].content}\n\n{message.content}"
            joined[-1] = replace(joined[-1], content=content)
        else:
            joined.append(message)
    return joined


def write_result(message: ChatMessage) -> ChatMessage:
    """Return the result of a call as a user's text."""
    return ChatMessage("user", f"<tool_response>\n{message.content}\n</tool_response>")


def write_calls(message: ChatMessage) -> ChatMessage:
    """Return a turn with its calls as part of its text."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.tool_calls]
    written = "\n".join(f"{CALL_START}\n{call}\n{CALL_END}" for call in calls)
    return ChatMessage(message.role, f"{message.content}\n{written}".strip())


def _flatten(message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        return write_result(message)
    return write_calls(message) if message.tool_calls else message
