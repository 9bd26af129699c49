"""`ssd load --url` against a server of another make: what it counts, and what it refuses."""

import http.server
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from launch.bench import http_load
from launch.bench.http_load import Server
from launch.bench.load import table
from launch.cli import cli
from protocol.errors import RuntimeFailure, UsageError
from protocol.messages import ChatMessage, Generate
from tests.chaos.http_client import Heard, ask_http
from tests.support.stack import DEADLINE_S


class Echo(http.server.BaseHTTPRequestHandler):
    """Streams the prompt back, a letter a token; fails where the prompt says so."""

    seen: list[dict[str, object]]

    def do_POST(self) -> None:  # the library's name
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({**body, "path": self.path, "key": self.headers["Authorization"]})
        text = body["messages"][0]["content"]
        self.send_response(429 if text == "full" else 200)
        self.end_headers()
        for letter in text[: body["max_tokens"]]:
            self._event({"choices": [{"delta": {"content": letter}}]})
        if text == "cut":
            self.wfile.write(b'data: {"choices": [{"del')
            return
        if text == "broken":
            self._event({"error": {"message": "the model is gone"}})
        elif text != "uncounted":
            tokens = min(len(text), body["max_tokens"])
            self._event({"choices": [], "usage": {"completion_tokens": tokens}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, body: object) -> None:
        self.wfile.write(b": a comment\n\ndata: " + json.dumps(body).encode() + b"\n\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the library's name
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Echo.seen = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(DEADLINE_S)


def test_answers_and_tokens_are_counted(url: str) -> None:
    """Each prompt has its own answer, whoever answered it; tokens are those of the usage."""
    load = Server(f"{url}/v1/", "m", "secret").load("server", ["one", "three", "six"], 4, 3)
    assert load.by_prompt == {0: "one", 1: "thre", 2: "six"}
    assert sum(one.tokens for one in load.answers) == 10
    assert 0 < load.answers[0].ttft_s < load.seconds
    assert {one["path"] for one in Echo.seen} == {"/v1/chat/completions"}
    assert {one["key"] for one in Echo.seen} == {"Bearer secret"}
    assert all("draft_model" not in one and one["model"] == "m" for one in Echo.seen)
    assert table([load]).row_count == 1


def test_plain_decoding_can_be_asked_for(url: str) -> None:
    """Our extension; nobody else is sent it."""
    Server(url).load("ar", ["x"], 4, 1)
    assert [one["draft_model"] for one in Echo.seen] == [None]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("full", "answered 429"),
        ("broken", "the model is gone"),
        ("uncounted", "sent no usage"),
        ("cut", "sent no usage"),
    ],
)
def test_what_goes_wrong_is_said(url: str, prompt: str, reason: str) -> None:
    """A refusal, an error within the stream, an answer without its count."""
    with pytest.raises(RuntimeFailure, match=reason):
        Server(url).load("server", [prompt], 100, 1)


@pytest.mark.parametrize(
    ("prompt", "heard"),
    [
        ("whole", Heard("whole", whole=True)),
        ("cut", Heard("cut", whole=False)),
    ],
)
def test_a_stream_that_breaks_is_an_outcome(url: str, prompt: str, heard: Heard) -> None:
    """The client of `make chaos` goes on, also when a stream ends within a line."""
    question = Generate(request=1, messages=[ChatMessage("user", prompt)], max_tokens=100)
    assert ask_http(url, question, lambda: None) == heard


class Crowded(http.server.ThreadingHTTPServer):
    """Resets its first connections, as a server does whose line of waiting clients is full."""

    left = 3

    def process_request(self, request: Any, client_address: Any) -> None:
        self.left -= 1
        if self.left < 0:
            super().process_request(request, client_address)
            return
        request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.close()


def test_a_crowded_server_is_asked_again() -> None:
    Echo.seen = []
    with Crowded(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = Server(f"http://127.0.0.1:{server.server_port}")
        load = asked.load("server", ["one", "two"], 4, 2)
        server.shutdown()
    assert load.by_prompt == {0: "one", 1: "two"}
    assert len(asked.resets) == 3


def test_a_server_that_is_always_crowded_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_load, "_CROWDED_S", 0.0)
    with Crowded(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = Server(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(RuntimeFailure, match="ConnectionResetError"):
            asked.load("server", ["one"], 4, 1)
        server.shutdown()
    assert asked.resets == []


class Closing(http.server.BaseHTTPRequestHandler):
    """Takes a request, and closes the connection instead of an answer."""

    seen = 0

    def do_POST(self) -> None:  # the library's name
        Closing.seen += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.close_connection = True


def test_a_request_that_was_taken_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be at work already."""
    monkeypatch.setattr(Closing, "seen", 0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Closing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = Server(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(RuntimeFailure, match="RemoteDisconnected"):
            asked.load("server", ["one"], 4, 1)
        server.shutdown()
    assert Closing.seen == 1


def test_nobody_there_is_said() -> None:
    """A closed port, and an address that is none."""
    with pytest.raises(RuntimeFailure, match=r"127\.0\.0\.1:1 "):
        Server("http://127.0.0.1:1").load("server", ["x"], 4, 1)
    for wrong in ("http://host:abc", "http://", "host"):
        with pytest.raises(UsageError, match="is not an address"):
            Server(wrong)
    with pytest.raises(UsageError, match="ftp"):
        Server("ftp://127.0.0.1")


def test_a_server_that_is_starting_is_waited_for() -> None:
    """It says what it waits for; then the server comes, and has no model for a while."""

    class Late(http.server.BaseHTTPRequestHandler):
        statuses: ClassVar = [404, 503]

        def do_GET(self) -> None:  # the library's name
            self.send_response(self.statuses.pop())
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    said: list[str] = []
    with http.server.HTTPServer(("127.0.0.1", 0), Late, bind_and_activate=False) as server:
        server.server_bind()
        port = server.server_address[1]

        def waiting(what: str) -> None:
            said.append(what)
            server.server_activate()
            thread.start()

        thread = threading.Thread(target=lambda: [server.handle_request() for _ in range(2)])
        Server(f"http://127.0.0.1:{port}").await_ready(DEADLINE_S, waiting)
        thread.join(DEADLINE_S)
    assert Late.statuses == []
    assert len(said) == 1
    assert "ConnectionRefusedError" in said[0]


def test_a_server_that_does_not_come_is_not_waited_for_forever() -> None:
    """The sentence names the limit."""
    with pytest.raises(RuntimeFailure, match=r"within 0\.1 s"):
        Server("http://127.0.0.1:1").await_ready(0.1, lambda what: None)


def test_a_server_that_says_nothing_is_not_waited_for_longer() -> None:
    """It may take connections long before it answers them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = time.monotonic()
        with pytest.raises(RuntimeFailure, match=r"within 0\.1 s: TimeoutError"):
            Server(f"http://127.0.0.1:{listener.getsockname()[1]}").await_ready(0.1, print)
        assert time.monotonic() - started < 60.0


def test_the_verb_asks_a_server(url: str) -> None:
    """A row per number of streams; flags of a stack of our own are refused."""
    asked = ["load", "--url", url, "--streams", "1,2", "--requests", "2", "-m", "4"]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0, done.output
    assert [line.split()[:2] for line in done.output.splitlines()[1:3]] == [
        ["server", "1"],
        ["server", "2"],
    ]
    refused = CliRunner().invoke(cli, [*asked, "--temp", "1"])
    assert isinstance(refused.exception, UsageError) or "--temp" in refused.output
