"""OpenAI's Responses API, asked by OpenAI's own client."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from protocol.errors import RuntimeFailure, UsageError
from protocol.messages import ChatMessage, Generate, Text
from services.gateway.dialects.conversations import Conversations
from tests.services.gateway.scripted import ScriptedClient, serving, write_template
from tests.support.stack import eventually

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<think></think>"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = f"<think>\nI should look.\n</think>\n\nLet me see.\n{CALL}"


@contextlib.contextmanager
def asking(stub: ScriptedClient, folder: Path, **settings: Any) -> Iterator[openai.OpenAI]:
    """OpenAI's client in front of what the model says."""
    with (
        serving(stub, write_template(folder, TEMPLATE), **settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def create(client: openai.OpenAI, **fields: Any) -> Response:
    response = client.responses.create(**{"model": "large", "input": "hello", **fields})
    assert isinstance(response, Response)
    # The published types, without their leniency.
    Response.model_validate(response.model_dump(by_alias=True), strict=True)
    return response


def test_a_response_is_given(tmp_path: Path) -> None:
    """With its text, its state and the tokens, those of the cache among them."""
    stub = ScriptedClient("Good day.")
    with asking(stub, tmp_path) as client:
        response = create(client, instructions="Be brief.", temperature=0.5, max_output_tokens=50)
    assert response.output_text == "Good day."
    assert (response.status, response.error, response.instructions) == (
        "completed", None, "Be brief.",
    )  # fmt: skip
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (20, 3)
    assert response.usage.input_tokens_details.cached_tokens == 8
    [request] = stub.requests
    assert request.messages == [ChatMessage("system", "Be brief."), ChatMessage("user", "hello")]
    assert (request.max_tokens, request.sampling.temperature) == (50, 0.5)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_stream_and_a_whole_are_the_same(tmp_path: Path, size: int) -> None:
    """Thought, text and call are items of their own, however the text is cut."""
    stub = ScriptedClient(ANSWER, ANSWER, size=size)
    with asking(stub, tmp_path) as client:
        whole = create(client, tools=[WEATHER])
        with client.responses.stream(model="large", input="hello", tools=[WEATHER]) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
    reasoning, message, call = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "I should look."
    assert whole.output_text.strip() == "Let me see."
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
    assert message.type == "message"

    def show(response: Any) -> list[dict[str, Any]]:
        shown = [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
        for item in shown:
            item.update(id="", call_id="")
            for part in item.get("content") or []:
                part.pop("parsed", None)
        return shown

    assert show(whole) == show(streamed)
    assert whole.usage == streamed.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_our_own_items_sent_back_are_the_conversation(tmp_path: Path) -> None:
    """Thought, text and call are one turn of the assistant's; then comes the result."""
    stub = ScriptedClient(ANSWER, "It is cold.")
    with asking(stub, tmp_path) as client:
        first = create(client, tools=[WEATHER])
        call: Any = first.output[-1]
        turns = [
            {"role": "user", "content": "hello"},
            *(item.model_dump() for item in first.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": "-5"},
            {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        ]
        second = create(client, tools=[WEATHER], input=turns)
    assert second.output_text == "It is cold."
    user, assistant, tool, system = stub.requests[1].messages
    assert (user, system) == (ChatMessage("user", "hello"), ChatMessage("system", "Be kind."))
    assert assistant.reasoning_content == "I should look."
    assert assistant.content.strip() == "Let me see."
    [called] = assistant.tool_calls
    assert called["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert (tool.role, tool.content, tool.tool_call_id) == ("tool", "-5", called["id"])


def test_a_response_is_continued_by_its_name(tmp_path: Path) -> None:
    """The conversation is remembered, its instructions are not; what is not stored is not."""
    stub = ScriptedClient("One.", "Two.", "Three.")
    with asking(stub, tmp_path) as client:
        first = create(client, instructions="Be brief.")
        second = create(client, input="and?", previous_response_id=first.id, store=False)
        assert stub.requests[1].messages == [
            ChatMessage("user", "hello"),
            ChatMessage("assistant", "One."),
            ChatMessage("user", "and?"),
        ]
        assert client.responses.retrieve(first.id).output_text == "One."
        with pytest.raises(openai.NotFoundError) as caught:
            create(client, previous_response_id=second.id)
        assert caught.value.code == "previous_response_not_found"
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)


def test_responses_are_forgotten_in_the_end() -> None:
    """Those that were not asked for longest go first; neither number nor size is exceeded."""
    few = Conversations(most=2)
    for name in "abc":
        few.keep(name, [ChatMessage("user", name)], {})
        few.find("a")
    assert [few.find(name) is not None for name in "abc"] == [True, False, True]
    small = Conversations(most_bytes=100)
    for name in "abc":
        small.keep(name, [ChatMessage("user", "x" * 60)], {})
    assert [small.find(name) is not None for name in "abc"] == [False, False, True]


def test_a_custom_tool_takes_a_text(tmp_path: Path) -> None:
    """It is a function of one text to the model, and a custom call to the client."""
    patch = {"type": "custom", "name": "apply_patch", "description": "Applies a patch."}
    said = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    stub = ScriptedClient(said, said)
    with asking(stub, tmp_path) as client:
        [call] = create(client, tools=[patch]).output
        with client.responses.stream(model="large", input="x", tools=[patch]) as stream:  # type: ignore[list-item]
            [streamed] = stream.get_final_response().output
    assert (call.type, streamed.type) == ("custom_tool_call", "custom_tool_call")
    assert (call.to_dict()["input"], streamed.to_dict()["input"]) == ("*** Begin", "*** Begin")


@pytest.mark.parametrize(
    ("choice", "tools"),
    [("required", 2), ("none", 0), ({"type": "function", "name": "weather"}, 1),
     ({"type": "allowed_tools", "mode": "auto",
       "tools": [{"type": "function", "name": "weather"}]}, 1)],
    ids=["required", "none", "one", "allowed"],
)  # fmt: skip
def test_tools_are_chosen(tmp_path: Path, choice: Any, tools: int) -> None:
    """As the client says, of those that can be called here."""
    stub = ScriptedClient(CALL)
    other = {**WEATHER, "name": "other"}
    with asking(stub, tmp_path) as client:
        raw = client.responses.with_raw_response.create(
            model="large", input="hello", tools=[WEATHER, other, {"type": "web_search"}],
            tool_choice=choice,
        )  # fmt: skip
    assert len(stub.requests[0].tools) == tools
    assert raw.headers["x-ignored-fields"] == "tools[].web_search"


def test_the_answer_may_have_to_be_json(tmp_path: Path) -> None:
    """A schema is a grammar, in which objects are closed."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    stub = ScriptedClient('{"n": 3}')
    with asking(stub, tmp_path) as client:
        format_: Any = {"type": "json_schema", "name": "x", "schema": schema}
        response = create(client, text={"format": format_})
    options = stub.requests[0].sampling.logits_options
    assert options is not None
    assert '"additionalProperties": false' in options.grammar
    assert response.output_text == '{"n": 3}'


def test_a_limit_leaves_a_response_incomplete(tmp_path: Path) -> None:
    """An unfinished call is still a call, and the state says so."""
    stub = ScriptedClient(CALL[:50])
    stub.reason = "length"
    with asking(stub, tmp_path) as client:
        response = create(client, tools=[WEATHER])
    [call] = response.output
    assert (call.type, call.to_dict()["status"]) == ("function_call", "incomplete")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    """Background, images, other models, an empty input."""
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    with asking(ScriptedClient(), tmp_path) as client:
        for fields, reason in (
            ({"background": True}, "background responses are not supported"),
            ({"input": image}, "images are not supported"),
            ({"input": []}, "nothing to answer"),
            ({"tool_choice": {"type": "function", "name": "x"}}, "no tool 'x'"),
        ):
            with pytest.raises(openai.BadRequestError, match=reason):
                create(client, **fields)
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            create(client, model="gpt-9")


class FailingClient(ScriptedClient):
    """An orchestrator that refuses, or fails after a word."""

    def __init__(self, error: Exception, *, words: int = 0) -> None:
        super().__init__()
        self._error, self._words = error, words

    async def generate(self, request: Generate, on_progress: Any = None) -> Any:
        for _ in range(self._words):
            yield Text(request=1, tokens=[5], origins=["hit"], pieces=["word"])
        raise self._error


def test_a_prompt_that_is_too_long_fails_in_the_stream(tmp_path: Path) -> None:
    """Where clients look for it; without a stream it is a status."""
    long = UsageError("the prompt has 900 tokens, but the model's context holds 512; shorten it")
    with asking(FailingClient(long), tmp_path) as client:
        *_, last = client.responses.create(model="large", input="hello", stream=True)
        with pytest.raises(openai.BadRequestError) as caught:
            create(client)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert caught.value.code == last.response.error.code == "context_length_exceeded"


def test_a_stream_that_breaks_says_so(tmp_path: Path) -> None:
    """With the stack's own sentence, as the last event."""
    with asking(FailingClient(RuntimeFailure("the verifier died"), words=2), tmp_path) as client:
        *_, last = client.responses.create(model="large", input="hello", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "the verifier died"


def test_leaving_a_stream_frees_its_place(tmp_path: Path) -> None:
    """The orchestrator is asked for nothing that nobody reads."""
    stub = ScriptedClient("again ", endless=True)
    with asking(stub, tmp_path) as client:
        with client.responses.create(model="large", input="hello", stream=True) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    break
            assert stub.open == 1
        eventually(lambda: stub.open == 0, "the request was cancelled")
