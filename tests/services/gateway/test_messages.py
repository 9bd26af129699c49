"""Anthropic's API, asked by Anthropic's own client."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock

from protocol.errors import UsageError
from protocol.messages import ChatMessage, Generate
from tests.services.gateway.scripted import ScriptedClient, serving, write_template
from tests.support.stack import eventually

THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}tools{% endif %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}"
)
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = f"<think>\nI should look.\n</think>\n\nLet me see.\n{CALL}"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@contextlib.contextmanager
def asking(
    stub: ScriptedClient, folder: Path, template: str = THINKS, **settings: Any
) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client in front of what the model says."""
    with (
        serving(stub, write_template(folder, template), **settings) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def create(client: anthropic.Anthropic, **fields: Any) -> Message:
    asked: dict[str, Any] = {"model": "large", "max_tokens": 100, "messages": HELLO, **fields}
    message = client.messages.create(**asked)
    assert isinstance(message, Message)
    return message


def test_a_message_is_answered(tmp_path: Path) -> None:
    """With its text, why it ended, and the tokens, of which cached ones are counted apart."""
    stub = ScriptedClient("Good day.")
    with asking(stub, tmp_path) as client:
        sampling = {"temperature": 0.5, "top_k": 5}
        message = create(client, system="Be brief.", stop_sequences=["x"], extra_body=sampling)
    assert message.content == [TextBlock(type="text", text="Good day.")]
    assert (message.role, message.stop_reason, message.stop_sequence) == (
        "assistant", "end_turn", None,
    )  # fmt: skip
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (12, 8, 3)
    [request] = stub.requests
    assert request.messages == [ChatMessage("system", "Be brief."), ChatMessage("user", "hello")]
    assert (request.max_tokens, request.stop, request.sampling.temperature) == (100, ["x"], 0.5)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_stream_and_a_whole_are_the_same(tmp_path: Path, size: int) -> None:
    """Thought, text and call are blocks of their own, however the text is cut."""
    fields: dict[str, Any] = {
        "tools": [WEATHER],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_tokens": 2000,
    }
    stub = ScriptedClient(ANSWER, ANSWER, size=size)
    with asking(stub, tmp_path) as client:
        whole = create(client, **fields)
        with client.messages.stream(model="large", messages=HELLO, **fields) as stream:
            first = next(iter(stream))
            events = [first.type, *(event.type for event in stream)]
            streamed = stream.get_final_message()
    thought, text, call = whole.content
    assert isinstance(thought, ThinkingBlock)
    assert isinstance(text, TextBlock)
    assert isinstance(call, ToolUseBlock)
    assert thought.thinking == "I should look."
    assert text.text.strip() == "Let me see."
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})
    assert (whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
    shown = [[block.to_dict() | {"id": ""} for block in m.content] for m in (whole, streamed)]
    assert shown[0] == shown[1]
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    assert streamed.usage.cache_read_input_tokens == 8
    assert first.type == "message_start"
    began = first.message.usage
    assert (began.input_tokens, began.cache_read_input_tokens) == (12, 8)
    assert events[-1] == "message_stop"


def test_a_result_that_is_an_error_says_so(tmp_path: Path) -> None:
    """The model reads it; a result that is none is shown as it came."""
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "gone", "is_error": is_error}
        for is_error in (True, False)
    ]
    stub = ScriptedClient("I see.")
    with asking(stub, tmp_path, "{{ tools }}{{ messages }}") as client:
        create(client, messages=[*HELLO, {"role": "user", "content": results}])
    shown = [message.content for message in stub.requests[0].messages if message.role == "tool"]
    assert shown == ["Error: gone", "gone"]


def test_a_conversation_with_tools_goes_on(tmp_path: Path) -> None:
    """Our own blocks sent back, with a result, are the turns that a template knows."""
    stub = ScriptedClient(ANSWER, "It is cold.")
    with asking(stub, tmp_path) as client:
        first = create(client, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 1024},
                       max_tokens=2000)  # fmt: skip
        call = next(block for block in first.content if block.type == "tool_use")
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "-5"}],
            "cache_control": {"type": "ephemeral"},
        }
        turns: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ]
        second = create(client, tools=[WEATHER], messages=turns)
    assert second.content[0].to_dict()["text"] == "It is cold."
    _, assistant, tool, user = stub.requests[1].messages
    assert assistant.reasoning_content == "I should look."
    [called] = assistant.tool_calls
    assert called["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert (tool.role, tool.content, tool.tool_call_id) == ("tool", "-5", called["id"])
    assert user == ChatMessage("user", "And?")
    assert [tool["function"]["name"] for tool in stub.requests[1].tools] == ["weather"]


def test_an_answer_that_the_client_began_is_continued(tmp_path: Path) -> None:
    """A last message of the assistant's is the beginning of the answer."""
    stub = ScriptedClient("two")
    with asking(stub, tmp_path) as client:
        create(client, messages=[*HELLO, {"role": "assistant", "content": "One and"}])
    assert stub.requests[0].answer_start == "One and"
    assert [message.role for message in stub.requests[0].messages] == ["user"]


@pytest.mark.parametrize(
    ("choice", "grammar", "tools"),
    [({"type": "auto"}, False, 1), ({"type": "any"}, True, 1), ({"type": "none"}, False, 0),
     ({"type": "tool", "name": "weather"}, True, 1)],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_tools_may_be_forced(
    tmp_path: Path, choice: dict[str, str], tools: int, *, grammar: bool
) -> None:
    """A call that must come is forced by a grammar, with thinking turned off."""
    stub = ScriptedClient(CALL)
    with asking(stub, tmp_path) as client:
        message = create(client, tools=[WEATHER], tool_choice=choice)
    options = stub.requests[0].sampling.logits_options
    assert (options is not None and bool(options.grammar)) == grammar
    assert len(stub.requests[0].tools) == tools
    assert [block.type for block in message.content] == (["tool_use"] if tools else ["text"])


def test_one_call_at_a_time(tmp_path: Path) -> None:
    """A client that wants no parallel calls gets the first."""
    with asking(ScriptedClient(f"{CALL}\n{CALL}"), tmp_path) as client:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = create(client, tools=[WEATHER], tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]


def test_a_stop_sequence_is_named(tmp_path: Path) -> None:
    """So clients know which of theirs ended the message."""
    stub = ScriptedClient("one")
    stub.stop_string = "END"
    with asking(stub, tmp_path) as client:
        message = create(client, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def test_a_thought_that_is_cut_off_stays_a_thought(tmp_path: Path) -> None:
    """Nothing of it becomes text."""
    stub = ScriptedClient("<think>I wonder")
    stub.reason = "length"
    with asking(stub, tmp_path) as client:
        message = create(client, thinking={"type": "adaptive"})
    assert [block.to_dict() for block in message.content] == [
        {"type": "thinking", "thinking": "I wonder", "signature": ""}
    ]
    assert message.stop_reason == "max_tokens"


def test_a_budget_ends_a_thought(tmp_path: Path) -> None:
    """The model is asked to go on after the end of its thought, from the same tokens."""
    stub = ScriptedClient("<think>" + "hm " * 2000, "The answer.")
    with asking(stub, tmp_path) as client:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = create(client, thinking=thinking, max_tokens=4000)
    thought, text = message.content
    assert thought.to_dict()["thinking"] == ("hm " * 1024).strip()
    assert text.to_dict()["text"] == "The answer."
    rest = stub.requests[1]
    assert (rest.answer_start, len(rest.answer_tokens)) == ("\n</think>\n\n", 1026)
    assert rest.max_tokens == 4000 - 1026
    assert stub.open == 0


def test_models_think_when_they_are_asked_to(tmp_path: Path) -> None:
    """As this API has it: without `thinking` the template is told not to."""
    stub = ScriptedClient("a", "b")
    with asking(stub, tmp_path) as client:
        create(client)
        create(client, thinking={"type": "enabled", "budget_tokens": 2048}, max_tokens=4000)
    assert [r.template_options.get("enable_thinking") for r in stub.requests] == [False, True]


def test_tokens_are_counted(tmp_path: Path) -> None:
    """By the same request, which is only counted; also where the prompt is too long."""
    stub = ScriptedClient()
    with asking(stub, tmp_path) as client:
        count = client.messages.count_tokens(model="large", messages=HELLO, system="Be brief.",
                                             tools=[WEATHER])  # type: ignore[list-item]  # fmt: skip
    assert count.input_tokens == 20
    [request] = stub.requests
    assert request.count_only
    assert [message.role for message in request.messages] == ["system", "user"]


class RefusingClient(ScriptedClient):
    """An orchestrator that refuses."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    async def generate(self, request: Generate, on_progress: Any = None) -> Any:
        raise UsageError(self._reason)
        yield


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_prompt_that_is_too_long_says_so_in_their_words(tmp_path: Path, *, stream: bool) -> None:
    """Clients shorten a conversation by themselves on this sentence."""
    reason = "the prompt has 900 tokens, but the model's context holds 512; shorten it"
    with asking(RefusingClient(reason), tmp_path) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            create(client, stream=stream)
        assert client.messages.count_tokens(model="large", messages=HELLO).input_tokens == 900
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "prompt is too long: 900 tokens > 512 maximum",
        },
    }


def test_the_model_is_listed(tmp_path: Path) -> None:
    """In a shape that this client reads as well as OpenAI's does."""
    with asking(ScriptedClient(), tmp_path) as client:
        [model] = client.models.list()
        assert (model.id, model.display_name) == ("large", "large")
        assert client.models.retrieve("large").created_at == model.created_at


def test_errors_have_their_shape(tmp_path: Path) -> None:
    """A model that is not here, an image, a missing field, and batches."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with asking(ScriptedClient(), tmp_path) as client:
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            create(client, model="claude-9")
        with pytest.raises(anthropic.BadRequestError, match="images are not supported"):
            create(client, messages=[{"role": "user", "content": [image]}])
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            create(client, max_tokens=0)
        with pytest.raises(anthropic.NotFoundError, match="there are no batches"):
            client.messages.batches.list()


def test_unknown_fields_are_named_and_left_out(tmp_path: Path) -> None:
    """Metadata, cache marks, tools of other servers: in a header, unless the server is strict."""
    fields: dict[str, Any] = {
        "model": "large",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]}],
        "metadata": {"user_id": "me"},
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
    }  # fmt: skip
    with asking(ScriptedClient("hi"), tmp_path) as client:
        raw = client.messages.with_raw_response.create(**fields)
    named = raw.headers["x-ignored-fields"].split(", ")
    assert set(named) == {
        "messages[].content[].cache_control", "metadata", "tools[].web_search_20250305",
    }  # fmt: skip
    with (
        asking(ScriptedClient(), tmp_path, strict=True) as client,
        pytest.raises(anthropic.BadRequestError, match="strict"),
    ):
        create(client, metadata={"user_id": "me"})


def test_leaving_a_stream_frees_its_place(tmp_path: Path) -> None:
    """The orchestrator is asked for nothing that nobody reads."""
    stub = ScriptedClient("again ", endless=True)
    with asking(stub, tmp_path) as client:
        with client.messages.stream(model="large", messages=HELLO, max_tokens=9) as stream:
            next(iter(stream.text_stream))
            assert stub.open == 1
        eventually(lambda: stub.open == 0, "the request was cancelled")
