"""Requests for a model that is being loaded: signs of life, a deadline, and who gives up."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from protocol.messages import ModelReady, Rejected, ReleaseModel, Sampling, ToModelServer, UseModel
from protocol.transport.channel import Hub
from protocol.transport.codec import Decoder
from services.gateway import app as app_module
from tests.services.gateway.scripted import ScriptedClient, serving, write_template
from tests.support.stack import DEADLINE_S, eventually

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
REASON = "cannot load the model: no weights"
DOORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}, ": keep-alive"),
    "completions": ("/v1/completions", {"prompt": "hello"}, ": keep-alive"),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 5}, 'data: {"type":"ping"}'),
    "responses": ("/v1/responses", {"input": "hello"}, "event: response.in_progress"),
}


class Loader:
    """A model server whose model is loaded, or found to be broken, when a test says so."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.load = threading.Event()
        self.fail = threading.Event()
        self.asked = 0
        self.released = 0
        self._folder = folder
        self._waiting: list[bytes] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with Hub[ToModelServer](self.address, Decoder(ToModelServer)) as hub:
            while not self._ending.is_set():
                hub.ready(0.01)
                while received := hub.receive():
                    self._take(*received)
                if self.load.is_set() or self.fail.is_set():
                    for peer in self._waiting:
                        hub.send(peer, self._answer())
                    self._waiting.clear()

    def _take(self, peer: bytes, message: object) -> None:
        if isinstance(message, UseModel):
            self.asked += 1
            self._waiting.append(peer)
        elif isinstance(message, ReleaseModel):
            self.released += 1

    def _answer(self) -> ModelReady | Rejected:
        if self.fail.is_set():
            return Rejected(REASON, "unavailable")
        return ModelReady(folder=str(self._folder), sampling=Sampling())

    def end(self) -> None:
        self._ending.set()
        self._thread.join(DEADLINE_S)


@contextlib.contextmanager
def loading(
    stub: ScriptedClient, run_dir: Path, tmp_path: Path, **settings: Any
) -> Iterator[tuple[Loader, str]]:
    """A gateway whose model is not loaded yet, its model server, and its URL."""
    loader = Loader(f"ipc://{run_dir}/c", write_template(tmp_path, PLAIN))
    try:
        with serving(stub, None, model_server=loader.address, **settings) as url:
            yield loader, url
    finally:
        loader.end()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come every 20 ms."""
    monkeypatch.setattr(app_module, "_KEEP_ALIVE_S", 0.02)


def connect(url: str) -> contextlib.closing[http.client.HTTPConnection]:
    host = url.removeprefix("http://")
    return contextlib.closing(http.client.HTTPConnection(host, timeout=DEADLINE_S))


def ask(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> None:
    data = json.dumps({"model": "large", **body})
    connection.request("POST", path, data, {"Content-Type": "application/json"})


@pytest.mark.parametrize("case", DOORS.values(), ids=DOORS)
def test_a_stream_shows_signs_of_life(
    run_dir: Path, tmp_path: Path, case: tuple[str, dict[str, Any], str]
) -> None:
    """Comments for people, and what each API has for it; the answer follows when it can."""
    path, body, sign = case
    with (
        loading(ScriptedClient("Good day."), run_dir, tmp_path) as (loader, url),
        connect(url) as connection,
    ):
        ask(connection, path, {**body, "stream": True})
        response = connection.getresponse()
        lines: list[str] = []
        while sum(line.startswith(sign) for line in lines) < 4:
            lines.append(response.readline().decode())
        assert sum(line == ": the model is being loaded\n" for line in lines) >= 2
        loader.load.set()
        rest = response.read().decode()
        assert "Goo" in rest
        eventually(lambda: loader.released == 1, "the model is released")


def test_real_clients_wait(run_dir: Path, tmp_path: Path) -> None:
    """Signs of life do not confuse them; who does not stream waits as well."""
    answers = [f"answer {number}" for number in range(4)]
    with (
        loading(ScriptedClient(*answers), run_dir, tmp_path) as (loader, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other,
    ):
        chunks = client.chat.completions.create(model="large", messages=HELLO, stream=True)
        assert next(iter(chunks)).choices[0].delta.role == "assistant"
        loader.load.set()
        *_, last = chunks
        assert last.choices[0].finish_reason == "stop"
        loader.load.clear()
        with client.responses.stream(model="large", input="hello") as events:
            assert next(iter(events)).type == "response.created"
            loader.load.set()
            assert events.get_final_response().output_text == answers[1]
        loader.load.clear()
        with other.messages.stream(model="large", messages=HELLO, max_tokens=9) as stream:
            assert next(iter(stream)).type == "message_start"
            loader.load.set()
            assert stream.get_final_text() == answers[2]
        loader.load.clear()
        told = threading.Thread(target=_load_once_asked, args=(loader, loader.asked))
        told.start()
        whole = client.chat.completions.create(model="large", messages=HELLO)
        told.join(DEADLINE_S)
    assert whole.choices[0].message.content == answers[3]


def _load_once_asked(loader: Loader, before: int) -> None:
    eventually(lambda: loader.asked > before, "the model is asked for")
    loader.load.set()


def test_nobody_waits_for_ever(run_dir: Path, tmp_path: Path) -> None:
    """After the time for loading: a status, or the last event of a stream."""
    with (
        loading(ScriptedClient(), run_dir, tmp_path, load_timeout_s=0.3) as (loader, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other,
    ):
        with pytest.raises(openai.InternalServerError, match=r"not loaded within 0\.3 s") as caught:
            client.chat.completions.create(model="large", messages=HELLO)
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match=r"not loaded within 0\.3 s"):
            list(client.chat.completions.create(model="large", messages=HELLO, stream=True))
        *_, last = client.responses.create(model="large", input="hello", stream=True)
        assert last.type == "response.failed"
        with (
            pytest.raises(anthropic.APIStatusError, match=r"not loaded within 0\.3 s"),
            other.messages.stream(model="large", messages=HELLO, max_tokens=9) as stream,
        ):
            list(stream)
        with pytest.raises(anthropic.InternalServerError, match=r"not loaded within 0\.3 s"):
            other.messages.count_tokens(model="large", messages=HELLO)
        eventually(lambda: loader.released == loader.asked == 5, "all of them are released")


def test_a_model_that_cannot_be_loaded_says_why(run_dir: Path, tmp_path: Path) -> None:
    """Also in a stream that has begun."""
    with (
        loading(ScriptedClient(), run_dir, tmp_path) as (loader, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        chunks = iter(client.chat.completions.create(model="large", messages=HELLO, stream=True))
        assert next(chunks).choices[0].delta.role == "assistant"
        loader.fail.set()
        with pytest.raises(openai.APIError, match=REASON):
            list(chunks)
        with pytest.raises(openai.InternalServerError, match=REASON):
            client.chat.completions.create(model="large", messages=HELLO)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_who_gives_up_needs_the_model_no_more(
    run_dir: Path, tmp_path: Path, *, stream: bool
) -> None:
    """The model server hears of it at once, and nothing is asked of the model."""
    stub = ScriptedClient()
    with loading(stub, run_dir, tmp_path) as (loader, url):
        with connect(url) as connection:
            ask(connection, "/v1/chat/completions", {"messages": HELLO, "stream": stream})
            eventually(lambda: loader.asked == 1, "the model is asked for")
        eventually(lambda: loader.released == 1, "it is released")
    assert stub.requests == []
