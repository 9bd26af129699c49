"""Anthropic's and OpenAI's newer doors, asked anything: an answer in their types, or a refusal."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from protocol.gateway import GatewayModel, GatewaySettings
from protocol.messages import FinishReason
from services.gateway.app import Gateway
from tests.protocol.test_fuzz import JSON, replaced
from tests.services.gateway.scripted import ScriptedClient, write_template
from tests.support.stack import DEADLINE_S

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<think></think>"
FUNCTION = {"type": "object", "properties": {"city": {"type": "string"}}}
TEXT = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
MESSAGES: tuple[dict[str, Any], ...] = (
    {
        "model": "large", "max_tokens": 500, "system": TEXT, "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "toolu_a", "name": "weather", "input": {"city": "x"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_a", "content": TEXT,
                 "is_error": False},
                *TEXT,
            ]},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": FUNCTION}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 100}, "stop_sequences": ["a"],
        "temperature": 0.5, "top_k": 3, "metadata": {"user_id": "a"},
    },
    {"model": "large", "max_tokens": 5, "messages": [{"role": "user", "content": TEXT}]},
)  # fmt: skip
RESPONSES: tuple[dict[str, Any], ...] = (
    {
        "model": "large", "instructions": "i", "max_output_tokens": 500, "store": False, "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "rs_a", "summary": [],
             "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "message", "role": "assistant", "id": "msg_a", "status": "completed",
             "content": [{"type": "output_text", "text": "so", "annotations": []}]},
            {"type": "function_call", "call_id": "call_a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_a", "output": "o"},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": FUNCTION},
                  {"type": "custom", "name": "patch"}, {"type": "web_search"}],
        "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}}, "temperature": 0.5, "metadata": {"a": "b"},
    },
    {"model": "large", "input": "hello", "max_output_tokens": 5, "previous_response_id": None},
)  # fmt: skip
FRAGMENTS = (
    "<think>", "</think>", "hm ", "\n\n", " ", "Yes.", "<tool_call>", "</tool_call>", "<tool",
    '{"name": "weather", "arguments": {"city": "Oslo"}}', '{"name": "weather", "argu',
    '{"name": "patch", "arguments": {"input": "x"}}', '{"name": "fly"}', "\U0001f600", "{", "}",
)  # fmt: skip
REASONS: tuple[FinishReason, ...] = ("stop", "length", "context")


class Said(ScriptedClient):
    """An orchestrator that gives the same answer as often as it is asked."""

    def set(self, text: str, reason: FinishReason) -> None:
        self.texts = [text] * 200
        self.reason = reason


@pytest.fixture(scope="module")
def stub() -> Said:
    return Said()


@pytest.fixture(scope="module")
def application(stub: Said, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_template(tmp_path_factory.mktemp("m"), TEMPLATE)
    models = [GatewayModel(names=["large"], clients_address="", folder=str(folder))]
    told = GatewaySettings(lifeline=0, listener=0, models=models)
    return Gateway(told, lambda _: cast("Any", stub)).app("")


@dataclass
class Answer:
    """What one request was answered by."""

    status: int = 0
    text: str = ""

    def json(self) -> Any:
        return json.loads(self.text)


def post(application: Any, path: str, body: Any) -> Answer:
    """One request within this process."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": b"",
        "query_string": b"", "server": ("localhost", 80), "client": ("localhost", 1),
        "scheme": "http", "headers": headers,
    }  # fmt: skip
    answer, bodies = Answer(), [json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
        answer.text += message.get("body", b"").decode()

    asyncio.run(asyncio.wait_for(application(scope, receive, send), DEADLINE_S))
    return answer


def read_events(text: str) -> Iterator[dict[str, Any]]:
    """The events of a stream; each says its own name."""
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


def check_refusal(response: Answer, *, anthropic: bool) -> None:
    """A refusal is the client's fault, and has a sentence in the API's shape."""
    assert response.status in (400, 404)
    body = response.json()
    assert body.get("type") == ("error" if anthropic else None)
    assert body["error"]["message"]


def check_message(response: Answer, *, stream: bool) -> None:
    """Blocks are opened, filled and closed in order, and the message is of Anthropic's type."""
    if not stream:
        Message.model_validate(response.json(), strict=True)
        return
    first, *middle, delta, last = read_events(response.text)
    assert (first["type"], delta["type"], last["type"]) == (
        "message_start", "message_delta", "message_stop",
    )  # fmt: skip
    opened = -1
    for event in middle:
        opened += event["type"] == "content_block_start"
        assert event["index"] == opened
    ends = [event["type"] for event in middle if event["type"] != "content_block_delta"]
    assert ends == ["content_block_start", "content_block_stop"] * (opened + 1)


def check_response(response: Answer, *, stream: bool) -> None:
    """Events are numbered, items are those of the last event, which is of OpenAI's type."""
    if not stream:
        Response.model_validate(response.json(), strict=True)
        return
    events = list(read_events(response.text))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    Response.model_validate(last["response"], strict=True)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]


SAID = st.tuples(
    st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), st.sampled_from(REASONS)
)
"""What the model says, and why it ends."""


@st.composite
def asked(draw: st.DrawFn, bodies: tuple[dict[str, Any], ...], *, stream: bool) -> Any:
    """A body with something else in one place, and fields that nobody knows."""
    body = draw(st.sampled_from(bodies).flatmap(replaced))
    if not isinstance(body, dict):
        return body
    more = draw(st.dictionaries(st.text(max_size=4), JSON, max_size=2))
    return {**more, **body, "stream": stream}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_messages_are_answered_or_refused(application: Any, stub: Said, *, stream: bool) -> None:
    """Whatever is asked, and whatever the model says to it."""

    @settings(max_examples=80)
    @given(body=asked(MESSAGES, stream=stream), said=SAID)
    def check(body: Any, said: tuple[str, FinishReason]) -> None:
        stub.set(*said)
        response = post(application, "/v1/messages", body)
        if response.status == 200:
            check_message(response, stream=stream)
        else:
            check_refusal(response, anthropic=True)

    check()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_responses_are_given_or_refused(application: Any, stub: Said, *, stream: bool) -> None:
    """Whatever is asked, and whatever the model says to it."""

    @settings(max_examples=80)
    @given(body=asked(RESPONSES, stream=stream), said=SAID)
    def check(body: Any, said: tuple[str, FinishReason]) -> None:
        stub.set(*said)
        response = post(application, "/v1/responses", body)
        if response.status == 200:
            check_response(response, stream=stream)
        else:
            check_refusal(response, anthropic=False)

    check()


@settings(max_examples=60)
@given(body=st.sampled_from(MESSAGES).flatmap(replaced))
def test_tokens_are_counted_or_the_count_refused(application: Any, body: Any) -> None:
    """The same for the counting of tokens."""
    response = post(application, "/v1/messages/count_tokens", body)
    if response.status == 200:
        assert response.json() == {"input_tokens": 20}
    else:
        check_refusal(response, anthropic=True)
