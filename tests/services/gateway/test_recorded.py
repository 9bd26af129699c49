"""What Codex 0.171 with an MCP server and Claude Code 2.1.197 sent, shortened.

Both were recorded with a scripted model behind the gateway.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.messages import ChatMessage, Sampling
from services.gateway.dialects.chat import parse_chat
from services.gateway.dialects.conversations import Conversations
from services.gateway.dialects.messages import parse_messages
from services.gateway.dialects.responses import parse_responses
from services.gateway.task import Task
from tests.services.gateway.scripted import ScriptedClient
from tests.services.gateway.test_responses import asking

CALL = '<tool_call>\n{"name": "mcp__notes__add_note", "arguments": {"text": "seven"}}\n</tool_call>'


def load(name: str) -> Any:
    """The requests of one run, in order."""
    return json.loads((Path(__file__).parent / "recorded" / name).read_text(encoding="utf-8"))


def read_codex(body: dict[str, Any]) -> Task:
    return parse_responses(msgspec.json.encode(body), Sampling(), Conversations())[0]


def test_tools_in_namespaces_are_functions() -> None:
    """The model knows them by both names; only what OpenAI's servers run is left out."""
    first, _ = load("codex_mcp.json")
    task = read_codex(first)
    names = [function.name for function in task.functions]
    assert names == [
        "exec_command", "multi_agent_v1__close_agent", "mcp__notes__add_note",
        "mcp__notes__list_notes",
    ]  # fmt: skip
    assert [name for name in task.unknown if name.startswith("tools")] == ["tools[].web_search"]


@pytest.mark.parametrize(
    "choice",
    ["auto", "required", {"type": "function", "name": "add_note", "namespace": "mcp__notes"},
     {"type": "allowed_tools", "mode": "required", "tools": [
         {"type": "function", "name": "add_note", "namespace": "mcp__notes"}]}],
    ids=["auto", "required", "named", "allowed"],
)  # fmt: skip
def test_a_call_has_the_name_and_the_namespace(tmp_path: Path, choice: Any) -> None:
    """Apart, as the client looks tools up; in a stream and whole."""
    first, _ = load("codex_mcp.json")
    only = {"tools": first["tools"][1:3], "tool_choice": choice}
    stub = ScriptedClient(CALL, CALL)
    with asking(stub, tmp_path) as client:
        asked: dict[str, Any] = {"model": "large", "input": first["input"], **only}
        [whole] = client.responses.create(**asked).output
        events = list(client.responses.create(**asked, stream=True))
    [done] = [event for event in events if event.type == "response.output_item.done"]
    for item in (whole.to_dict(), done.item.to_dict()):
        shown = (item["type"], item["namespace"], item["name"], item["arguments"])
        assert shown == ("function_call", "mcp__notes", "add_note", '{"text": "seven"}')
    [arguments] = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert arguments.name == "add_note"


def test_a_call_in_a_namespace_goes_into_the_history() -> None:
    """By the name that the model wrote; the request before is a prefix of this one."""
    first, second = (read_codex(body) for body in load("codex_mcp.json"))
    before, after = first.prompts[0].messages, second.prompts[0].messages
    assert after[: len(before)] == before
    assistant, result = after[len(before) :]
    assert assistant.tool_calls[0]["function"] == {
        "name": "mcp__notes__add_note", "arguments": {"text": "seven"},
    }  # fmt: skip
    assert result.content == "Wall time: 0.0039 seconds\nOutput:\nkept as note 7"
    assert result.tool_call_id == assistant.tool_calls[0]["id"]


def test_what_is_for_the_provider_is_not_in_the_prompt() -> None:
    """Two conversations of Claude Code differ in the user's last words only."""
    tasks = [parse_messages(msgspec.json.encode(b), Sampling()) for b in load("claude_code.json")]
    first, second = (task.prompts[0].messages for task in tasks)
    assert first[0] == second[0]
    assert first[0].content.startswith("You are a Claude agent")
    said = [messages[1].content.rpartition("\n") for messages in (first, second)]
    assert said[0][0] == said[1][0]
    assert [words for *_, words in said] == ["say one", "say two"]
    assert "system.x-anthropic-billing-header" in tasks[0].unknown


HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"


@pytest.mark.parametrize(
    ("system", "left"),
    [
        (HEADER, ""),
        (f"{HEADER}\nYou are brief.", "You are brief."),
        (f"{HEADER}\nx-other-client-session: 5\nYou are brief.", "You are brief."),
        (f"You are brief.\n{HEADER}", f"You are brief.\n{HEADER}"),
        ("x: the unknown\nSolve for it.", "x: the unknown\nSolve for it."),
        ("X-rays: explain them.", "X-rays: explain them."),
    ],
    ids=["alone", "first line", "two lines", "later", "no header", "prose"],
)
def test_headers_are_the_first_lines_of_instructions(system: str, left: str) -> None:
    """In every API, as one text or as blocks; what stands elsewhere is the client's text."""
    user = {"role": "user", "content": "hello"}
    bodies: list[Task] = [
        parse_messages(
            msgspec.json.encode({"max_tokens": 5, "system": given, "messages": [user]}), Sampling()
        )
        for given in (system, [{"type": "text", "text": system}])
    ]
    turns = [{"role": "system", "content": system}, user]
    bodies.append(parse_chat(msgspec.json.encode({"messages": turns}), Sampling())[0])
    bodies.append(read_codex({"instructions": system, "input": "hello"}))
    expected = [ChatMessage("system", left)] if left else []
    for task in bodies:
        assert task.prompts[0].messages == [*expected, ChatMessage("user", "hello")]
