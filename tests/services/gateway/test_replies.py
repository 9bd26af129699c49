"""Whatever a model says, each API's stream adds up to what its whole answer says.

Of many answers to one request a few are asked for at a time.
"""

import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import Busy
from protocol.gateway import GatewayModel, GatewaySettings
from protocol.messages import (
    ChatMessage,
    Finished,
    Generate,
    Logprobs,
    Progress,
    Sampling,
    ShownToken,
    Text,
)
from services.gateway import generation
from services.gateway.dialects import chat_reply
from services.gateway.dialects.base import Reading, Reply
from services.gateway.dialects.chat_reply import read_chat
from services.gateway.dialects.conversations import Conversations
from services.gateway.dialects.messages_reply import read_messages
from services.gateway.dialects.responses_reply import read_responses
from services.gateway.reasoning import ThoughtFormat
from services.gateway.task import Choice, TaskPlanner
from services.gateway.template import ModelText
from services.gateway.transcript import AnswerFormat, Transcript
from tests.services.gateway.scripted import ScriptedClient, finish, serving

GATEWAY = GatewaySettings(
    lifeline=0, listener=0, models=[GatewayModel(names=["m"], clients_address="")]
)
THINKS = AnswerFormat(thoughts=ThoughtFormat("<think>", "</think>"))
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}',
         "\n", " ", "word", "<", "</", "<tool_"]  # fmt: skip
CHAT = {
    "messages": [{"role": "user", "content": "a"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "stream": True,
}
MESSAGE = {
    "messages": CHAT["messages"],
    "max_tokens": 9,
    "tools": [{"name": "f", "input_schema": {}}],
}
RESPONSE = {"input": "a", "tools": [{"type": "function", "name": "f"}], "store": False}
Parts = list[tuple[str, str]]


def events(data: list[bytes]) -> Iterator[dict[str, Any]]:
    """The bodies of server-sent events."""
    for line in b"".join(data).split(b"\n\n"):
        body = line.rpartition(b"data: ")[2]
        if body and body != b"[DONE]":
            yield json.loads(body)


def join(parts: Parts) -> Parts:
    """Neighbours of one kind are one; blanks alone are nothing."""
    joined: Parts = []
    for kind, text in parts:
        if joined and joined[-1][0] == kind != "call":
            joined[-1] = (kind, joined[-1][1] + text)
        else:
            joined.append((kind, text))
    return [(kind, text) for kind, text in joined if text.strip()]


def of_messages(stream: list[dict[str, Any]]) -> Parts:
    parts: Parts = []
    for event in stream:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            parts.append(("call", event["content_block"]["name"]))
        delta = event.get("delta", {}) if event["type"] == "content_block_delta" else {}
        if delta.get("type") == "text_delta":
            parts.append(("text", delta["text"]))
        if delta.get("type") == "thinking_delta":
            parts.append(("thought", delta["thinking"]))
    opened = [e["index"] for e in stream if e["type"] == "content_block_start"]
    closed = [e["index"] for e in stream if e["type"] == "content_block_stop"]
    assert opened == closed == list(range(len(opened)))
    return join(parts)


def whole_message(body: dict[str, Any]) -> Parts:
    names = {"text": "text", "thinking": "thinking", "tool_use": "name"}
    kinds = {"text": "text", "thinking": "thought", "tool_use": "call"}
    return [(kinds[b["type"]], b[names[b["type"]]]) for b in body["content"]]


def of_responses(stream: list[dict[str, Any]]) -> Parts:
    kinds = {
        "response.output_text.delta": "text",
        "response.reasoning_text.delta": "thought",
    }
    parts: Parts = []
    for event in stream:
        if event["type"] in kinds:
            parts.append((kinds[event["type"]], event["delta"]))
        if event["type"] == "response.output_item.added" and "name" in event["item"]:
            parts.append(("call", event["item"]["name"]))
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    done = [e["item"] for e in stream if e["type"] == "response.output_item.done"]
    assert done == stream[-1]["response"]["output"]
    return join(parts)


def whole_response(body: dict[str, Any]) -> Parts:
    parts: Parts = []
    for item in body["output"]:
        if item["type"] == "function_call":
            parts.append(("call", item["name"]))
        else:
            kind = "text" if item["type"] == "message" else "thought"
            parts.append((kind, item["content"][0]["text"]))
    return parts


def of_chat(stream: list[dict[str, Any]]) -> Parts:
    deltas = [chunk["choices"][0]["delta"] for chunk in stream if chunk["choices"]]
    texts = "".join(delta.get("content") or "" for delta in deltas)
    thoughts = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    names = [("call", call["function"]["name"]) for call in calls]
    return join([("thought", thoughts), ("text", texts.strip() if calls else texts), *names])


def whole_chat(body: dict[str, Any]) -> Parts:
    message = body["choices"][0]["message"]
    calls = [("call", call["function"]["name"]) for call in message.get("tool_calls") or []]
    thought = ("thought", message.get("reasoning_content") or "")
    return join([thought, ("text", message["content"] or ""), *calls])


def make_reply(reading: Reading) -> Reply:
    choice = TaskPlanner(ModelText()).plan(reading.task)[0]
    reader = THINKS.reader(reading.task.functions)
    reply = reading.make_reply("m")
    reply.open([Choice(0, choice.request, Transcript(reader))])
    return reply


def read_response(body: bytes, settings: GatewaySettings) -> Reading:
    return read_responses(body, settings, Conversations())


Split = Callable[[Any], Parts]
APIS: dict[str, tuple[Any, dict[str, Any], Split, Split]] = {
    "chat": (read_chat, CHAT, of_chat, whole_chat),
    "messages": (read_messages, MESSAGE, of_messages, whole_message),
    "responses": (read_response, RESPONSE, of_responses, whole_response),
}


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@given(words=st.lists(st.sampled_from(WORDS), max_size=12), size=st.integers(1, 9),
       cut_off=st.booleans())  # fmt: skip
def test_a_stream_adds_up(
    api: tuple[Any, dict[str, Any], Split, Split], words: list[str], size: int, *, cut_off: bool
) -> None:
    """Kinds, order and texts of the parts are the same, however the text is cut."""
    read, body, split_stream, split_whole = api
    reading = read(json.dumps(body).encode(), GATEWAY)
    text, end = "".join(words), finish("length" if cut_off else "stop")
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    streamed, whole = make_reply(reading), make_reply(reading)
    sent = streamed.start()
    for piece in pieces:
        message = Text(request=1, tokens=[5], origins=["target"], pieces=[piece])
        sent += streamed.add(streamed.choices[0], streamed.choices[0].transcript.push(message))
        whole.choices[0].transcript.push(message)
    for reply in (streamed, whole):
        reply.choices[0].finished = end
    rest = streamed.choices[0].transcript.end(cut_off=cut_off)
    sent += [*streamed.finish(streamed.choices[0], rest), *streamed.end()]
    whole.choices[0].transcript.end(cut_off=cut_off)
    assert split_stream(list(events(sent))) == split_whole(whole.whole())
    assert ChatMessage("user", "a") in reading.task.prompts[0].messages
    assert reading.task.sampling == Sampling(seed=reading.task.sampling.seed)


# ---------------------------------------------------------------- many answers to one request


class FullClient(ScriptedClient):
    """Its queue is full at every second question but for the first of a request."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.most = 0
        self.refused: set[int] = set()

    async def generate(
        self, request: Generate, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> AsyncGenerator[Text | Finished]:
        self.most = max(self.most, self.open)
        if len(self.requests) >= 16 and request.request not in self.refused:
            self.refused.add(request.request)
            raise Busy("too many requests wait already")
        token = ShownToken("said", list(b"said"), -0.5)
        async for event in super().generate(request, on_progress):
            is_text = isinstance(event, Text)
            entries = [Logprobs(token, [token])]
            yield (
                Text(request=1, tokens=[5], origins=["hit"], pieces=["said"], logprobs=entries)
                if is_text
                else event
            )


def ask(url: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hello"}], **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(  # noqa: S310  # a server of this test
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        return json.load(response)


def test_a_few_answers_are_asked_for_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that find the queue full are asked for again; the seeds are as they were."""
    monkeypatch.setattr(generation, "_BUSY_S", 0.0)
    client = FullClient(*["sai"] * 128)
    with serving(client) as url:
        answer = ask(url, n=128, seed=7)
    assert [choice["index"] for choice in answer["choices"]] == list(range(128))
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"said"}
    assert [choice["ssd"]["seed"] for choice in answer["choices"]] == list(range(7, 135))
    assert len(client.refused) == 112
    assert client.most == 15


def test_log_probabilities_that_are_not_streamed_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole answers keep them in memory, so beyond a limit they are an error that says so."""
    with serving(FullClient("sai", "sai")) as url:
        fields = {"logprobs": True, "top_logprobs": 1}
        shown = {"token": "said", "logprob": -0.5, "bytes": list(b"said")}
        [choice] = ask(url, **fields)["choices"]
        assert choice["logprobs"]["content"] == [{**shown, "top_logprobs": [shown]}]
        monkeypatch.setattr(chat_reply, "_MOST_KEPT", 100)
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(url, **fields)
        assert (caught.value.code, json.load(caught.value)["error"]["param"]) == (400, "logprobs")
