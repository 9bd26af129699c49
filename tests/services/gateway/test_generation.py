"""Many answers to one request: a few at a time, and each comes in the end."""

import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from protocol.errors import Busy
from protocol.messages import Finished, Generate, Logprobs, Progress, ShownToken, Text
from services.gateway import generation
from services.gateway.dialects import chat_reply
from tests.services.gateway.scripted import ScriptedClient, serving


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
