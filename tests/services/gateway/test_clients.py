"""What real clients send to the chat and completion APIs, by OpenAI's own client."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from protocol.messages import ChatMessage
from services.gateway import body
from tests.services.gateway.scripted import ScriptedClient, serving, write_template

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
KNOWS_TOOLS = f"{PLAIN}{{{{ tools }}}}"
THINKS = f"{KNOWS_TOOLS}<think></think>"


@contextlib.contextmanager
def asking(
    stub: ScriptedClient, folder: Path, template: str = KNOWS_TOOLS, **settings: Any
) -> Iterator[openai.OpenAI]:
    """OpenAI's client in front of what the model says."""
    with (
        serving(stub, write_template(folder, template), **settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "large", "messages": HELLO, **fields})


def test_our_own_answer_is_taken_back(tmp_path: Path) -> None:
    """As the client dumps it, with all the fields that its library knows."""
    stub = ScriptedClient(f"<think>hm</think>Well.{CALL}", "Fine.")
    with asking(stub, tmp_path, THINKS) as client:
        message = chat(client, tools=[WEATHER]).choices[0].message
        [call] = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "-5"}
        second = chat(client, messages=[*HELLO, message.model_dump(), result], tools=[WEATHER])
    assert message.reasoning_content == "hm"
    assert second.choices[0].message.content == "Fine."
    _, assistant, tool = stub.requests[1].messages
    assert (assistant.content, assistant.reasoning_content) == ("Well.", "hm")
    assert assistant.tool_calls[0]["function"]["arguments"] == {"city": "Oslo"}
    assert tool.tool_call_id == assistant.tool_calls[0]["id"] == call.id


def test_unknown_fields_are_named_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a header of every answer, in the log the first time; a strict server refuses them."""
    monkeypatch.setattr(body, "_logged", set[str]())
    known: dict[str, Any] = {"reasoning_effort": "low", "parallel_tool_calls": False}
    unknown: dict[str, Any] = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "x",
        "extra_body": {"cache_prompt": True, "näme\r\n": 1, "nothing": None},
    }
    caplog.set_level("INFO", "services.gateway.body")
    with asking(ScriptedClient("a", "b"), tmp_path) as client:
        for stream in (False, True):
            raw = client.chat.completions.with_raw_response.create(
                model="large", messages=HELLO, stream=stream, **known, **unknown
            )
            named = set(raw.headers["x-ignored-fields"].split(", "))
            assert named == {
                "store", "metadata", "service_tier", "prompt_cache_key", "cache_prompt", "n_me__",
            }  # fmt: skip
            raw.parse()
    assert sum("'store'" in record.getMessage() for record in caplog.records) == 1
    with (
        asking(ScriptedClient(), tmp_path, strict=True) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        chat(client, store=True)
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "store")


def test_one_call_at_a_time(tmp_path: Path) -> None:
    """`parallel_tool_calls: false` gives the first call, streaming or not."""
    stub = ScriptedClient(f"{CALL}\n{CALL}", f"{CALL}\n{CALL}", f"{CALL}\n{CALL}")
    with asking(stub, tmp_path) as client:
        both = chat(client, tools=[WEATHER])
        one = chat(client, tools=[WEATHER], parallel_tool_calls=False)
        chunks = list(chat(client, tools=[WEATHER], parallel_tool_calls=False, stream=True))
    assert len(both.choices[0].message.tool_calls) == 2
    assert len(one.choices[0].message.tool_calls) == 1
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.arguments for call in calls] == ['{"city": "Oslo"}']
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_any_model_has_tools(tmp_path: Path) -> None:
    """A template that knows none gets them as text, with the turns of tools."""
    stub = ScriptedClient(CALL)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "-5"},
    ]
    with asking(stub, tmp_path, PLAIN) as client:
        [choice] = chat(client, messages=turns, tools=[WEATHER]).choices
    assert choice.message.tool_calls[0].function.name == "weather"
    [request] = stub.requests
    assert request.tools == []
    system, _, assistant, result = request.messages
    assert '"name": "weather"' in system.content
    assert assistant.content.startswith("<tool_call>")
    assert result == ChatMessage("user", "<tool_response>\n-5\n</tool_response>")


@pytest.mark.parametrize(
    ("choice", "tools", "forced"),
    [
        ("auto", ["weather", "other"], False),
        ("required", ["weather", "other"], True),
        ({"type": "function", "function": {"name": "other"}}, ["other"], True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "weather"}}]}}, ["weather"], False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "weather"}}]}}, ["weather"], True),
    ],
    ids=["auto", "required", "named", "allowed", "one of the allowed"],
)  # fmt: skip
def test_tools_are_chosen(tmp_path: Path, choice: Any, tools: list[str], *, forced: bool) -> None:
    """A call that must come is forced by a grammar, in which objects are closed."""
    stub = ScriptedClient(CALL)
    with asking(stub, tmp_path) as client:
        chat(client, tools=[WEATHER, OTHER], tool_choice=choice)
    [request] = stub.requests
    assert [tool["function"]["name"] for tool in request.tools] == tools
    options = request.sampling.logits_options
    assert (options is not None) == forced
    if options is not None and "weather" in tools:
        assert '"required": ["city"], "additionalProperties": false' in options.grammar


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_unfinished_call_is_a_call(tmp_path: Path, *, stream: bool) -> None:
    """A limit within a forced call leaves its name and what there is of its arguments."""
    stub = ScriptedClient(CALL[:60])
    stub.reason = "length"
    with asking(stub, tmp_path) as client:
        answer = chat(client, tools=[WEATHER], tool_choice="required", stream=stream)
        if stream:
            choices = [chunk.choices[0] for chunk in answer]
            [call] = [c for choice in choices for c in choice.delta.tool_calls or []]
            reason = choices[-1].finish_reason
        else:
            [call], reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"')
    assert reason == "length"
    turns = [*HELLO, {"role": "assistant", "tool_calls": [{
        "id": call.id, "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments}}]},
        {"role": "tool", "tool_call_id": call.id, "content": "cut off"}]  # fmt: skip
    again = ScriptedClient("ok")
    with asking(again, tmp_path) as client:
        chat(client, messages=turns)
    assert again.requests[0].messages[1].tool_calls[0]["function"]["name"] == "weather"


def test_limits_have_several_names(tmp_path: Path) -> None:
    """Both at once, the newer wins; -1 is no limit."""
    stub = ScriptedClient(*"abc")
    with asking(stub, tmp_path) as client:
        chat(client, max_tokens=16, max_completion_tokens=8)
        chat(client, max_tokens=-1)
        client.completions.create(model="large", prompt="x", max_tokens=-1)
    assert [request.max_tokens for request in stub.requests] == [8, 2**31 - 1, 2**31 - 1]


def test_several_texts_are_continued(tmp_path: Path) -> None:
    """Choices are numbered prompt by prompt; `echo` repeats each before its continuation."""
    stub = ScriptedClient(*"abcdabcdef", size=1)
    with asking(stub, tmp_path) as client:
        asked: dict[str, Any] = {"model": "large", "prompt": ["one ", "two "], "n": 2}
        whole = client.completions.create(**asked, echo=True)
        streamed = ["", "", "", ""]
        for chunk in client.completions.create(**asked, echo=True, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        tokens = client.completions.create(model="large", prompt=[[5, 6], [7]])
    texts = [choice.text for choice in whole.choices]
    assert [text[:-1] for text in texts] == ["one ", "one ", "two ", "two "]
    assert sorted(text[-1] for text in texts) == list("abcd")
    assert [text[:-1] for text in streamed] == ["one ", "one ", "two ", "two "]
    assert len(tokens.choices) == 2
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (40, 4)
    assert [request.tokens for request in stub.requests[-2:]] == [[5, 6], [7]]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
         "<|fim_prefix|>def f(<|fim_suffix|>: pass<|fim_middle|>"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]: pass[PREFIX]def f("),
    ],
    ids=["prefix first", "suffix first"],
)  # fmt: skip
def test_a_gap_is_filled(tmp_path: Path, tokens: list[str], text: str) -> None:
    """By models that have tokens for it; `echo` repeats the text before the gap."""
    stub = ScriptedClient("x)")
    asked: dict[str, Any] = {"model": "large", "prompt": "def f(", "suffix": ": pass"}
    with (
        serving(stub, write_template(tmp_path, PLAIN, tokens)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.create(**asked, echo=True)
    assert answer.choices[0].text == "def f(x)"
    assert stub.requests[0].text == text


def test_a_gap_is_left_to_those_who_can(tmp_path: Path) -> None:
    """Others refuse, and so does a prompt of tokens."""
    with asking(ScriptedClient(), tmp_path) as client:
        for prompt, reason in (("a", "has no tokens for filling in"), ([5], "given as text")):
            with pytest.raises(openai.BadRequestError, match=reason):
                client.completions.create(model="large", prompt=prompt, suffix="b")


def test_the_other_rule_is_there(tmp_path: Path) -> None:
    """Acceptance by rejection, with the drafter's own sampling and Saguaro's weight."""
    stub = ScriptedClient(*"abc")
    fields: dict[str, Any] = {"temperature": 1, "extra_body": {
        "acceptance": "rejection", "saguaro_c": 0.5, "draft_temperature": 0.8}}  # fmt: skip
    with asking(stub, tmp_path) as client:
        chat(client, **fields)
        with pytest.raises(openai.BadRequestError, match="needs the rejection rule"):
            chat(client, temperature=1, extra_body={"saguaro_c": 0.5})
    [fixed] = stub.requests
    sampling = fixed.sampling
    assert (sampling.acceptance, sampling.saguaro, sampling.draft_temperature) == (
        "rejection", 0.5, 0.8,
    )  # fmt: skip


def test_thoughts_are_apart(tmp_path: Path) -> None:
    """As `reasoning_content`, in streams too, with their tokens counted."""
    stub = ScriptedClient("<think>\nhm hm\n</think>\n\nYes.", "<think>\nhm hm\n</think>\n\nYes.")
    with asking(stub, tmp_path, THINKS) as client:
        whole = chat(client)
        deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True)]
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm hm", "Yes.")
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert (reasoning, "".join(delta.content or "" for delta in deltas)) == ("hm hm", "Yes.")


@pytest.mark.parametrize(
    ("path", "reason"),
    [("embeddings", "embeddings are not computed"), ("batches", "no batches")],
)
def test_what_is_not_here_is_said(tmp_path: Path, path: str, reason: str) -> None:
    """With a sentence, not only a status."""
    with (
        asking(ScriptedClient(), tmp_path) as client,
        pytest.raises(openai.NotFoundError, match=reason),
    ):
        client.post(f"/{path}", cast_to=object, body={})


def test_background_requests_are_marked(tmp_path: Path) -> None:
    """By a header: they wait until nobody else does."""
    stub = ScriptedClient(*"ab")
    with asking(stub, tmp_path) as client:
        chat(client)
        chat(client, extra_headers={"X-Priority": "background"})
    assert [request.is_background for request in stub.requests] == [False, True]


def test_other_oddities(tmp_path: Path) -> None:
    """Several system messages, refusals, functions' turns, a message that is to be continued."""
    stub = ScriptedClient(*"ab")
    with asking(stub, tmp_path) as client:
        turns = [
            {"role": "system", "content": "A."},
            {"role": "developer", "content": [{"type": "text", "text": "B."}]},
            *HELLO,
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "function", "name": "f", "content": "1"},
        ]
        chat(client, messages=turns)
        started = [*HELLO, {"role": "assistant", "content": "One"}]
        chat(client, messages=started, extra_body={"continue_final_message": True})
    first, second = stub.requests
    assert [message.content for message in first.messages] == ["A.\n\nB.", "hello", "No.", "1"]
    assert first.messages[-1].role == "tool"
    assert (second.answer_start, len(second.messages)) == ("One", 1)
    assert json.dumps(second.template_options) == "{}"
