"""The gateway beside an orchestrator that is full, slow or broken: no process, no socket."""

import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import (
    Busy,
    DeadlineExceeded,
    RuntimeFailure,
    ServiceLost,
    SsdError,
    UsageError,
)
from protocol.gateway import GatewayModel, GatewaySettings
from protocol.messages import Finished, Generate, Progress, Status, Text
from services.gateway import app as app_module
from services.gateway.app import Gateway
from services.gateway.auth import RateLimit
from services.gateway.body import decode_body
from services.gateway.dialects.chat import ChatRequest
from services.gateway.errors import ApiError
from services.gateway.main import run
from services.gateway.stream import watch_events
from tests.services.gateway.scripted import ScriptedClient, serving

STATUS = Status(pid=1, model="/models/large", services=[], active=0, waiting=0)
BODY = {"messages": [{"role": "user", "content": "hello"}]}


MODELS = [GatewayModel(names=["large"], clients_address="")]


class FakeClient:
    """Says one word, after a silence, and then fails."""

    def __init__(self, error: SsdError, *, words: int = 0, silence: bool = False) -> None:
        """`silence`: until it is told to `speak`."""
        self._error = error
        self._words = words
        self.speak = asyncio.Event()
        if not silence:
            self.speak.set()
        self.closed = False

    async def status(self, timeout_s: float) -> Status:
        if isinstance(self._error, DeadlineExceeded):
            raise self._error
        return STATUS

    async def generate(
        self, request: Generate, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> AsyncGenerator[Text | Finished]:
        try:
            if request.progress:
                on_progress(Progress(request=request.request, prompt_tokens=6000, computed=1024))
            await self.speak.wait()
            for _ in range(self._words):
                yield Text(request=request.request, tokens=[5], origins=["hit"], pieces=["word"])
            raise self._error
        finally:
            self.closed = True


def ask(
    client: Any, body: dict[str, Any], *, key: str = "", path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None, application: Any = None,
    leave_after: int = 10**6, method: str = "POST",
    when: Callable[[str], None] = lambda piece: None,
) -> tuple[int, str]:  # fmt: skip
    """Status and body of one request; the client leaves after so many pieces of the answer, and
    `when` is called with each."""
    settings = GatewaySettings(lifeline=0, listener=0, models=MODELS)
    application = application or Gateway(settings, lambda _: client).app(key)
    given = {"host": "localhost", "content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "server": ("localhost", 80),
        "client": ("localhost", 1),
        "scheme": "http",
    }
    sent: list[dict[str, Any]] = []
    left = asyncio.Event()
    bodies = [json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        when(message.get("body", b"").decode())
        if len(sent) > leave_after:
            left.set()
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(application(scope, receive, send), 60))
    text = b"".join(message.get("body", b"") for message in sent).decode()
    return sent[0]["status"], text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Busy("too many requests are waiting"), 429),
        (ServiceLost("the verifier is gone"), 503),
        (DeadlineExceeded("no status"), 503),
        (RuntimeFailure("the verifier failed"), 500),
    ],
    ids=["full", "lost", "silent", "failed"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_the_stack_cannot_do(error: SsdError, status: int, *, stream: bool) -> None:
    """Each is a status with the stack's own sentence, also if a stream was asked for."""
    got, text = ask(FakeClient(error), {**BODY, "stream": stream})
    assert got == status
    assert json.loads(text)["error"]["message"] == str(error)


def test_a_stream_that_breaks_says_so() -> None:
    """After the first words the error is an event, and the stream still ends properly."""
    client = FakeClient(RuntimeFailure("the verifier died"), words=2)
    status, text = ask(client, {**BODY, "stream": True})
    *_, error, done = [line for line in text.split("\n\n") if line]
    assert (status, done) == (200, "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the verifier died"
    assert client.closed


@pytest.mark.parametrize(("host", "status"), [("box.local:80", 429), ("other.local", 403)])
def test_other_names_may_be_allowed(host: str, status: int) -> None:
    """Those of containers and tunnels, for instance."""
    settings = GatewaySettings(lifeline=0, listener=0, models=MODELS, hosts=["Box.local"])
    application = Gateway(settings, lambda _: cast("Any", FakeClient(Busy("full")))).app("")
    assert ask(None, BODY, headers={"host": host}, application=application)[0] == status


ALIVE: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {}, ": keep-alive"),
    "messages": ("/v1/messages", {"max_tokens": 5}, 'data: {"type":"ping"}'),
    "responses": ("/v1/responses", {"input": "a"}, "event: response.in_progress"),
}


@pytest.mark.parametrize("case", ALIVE.values(), ids=ALIVE)
def test_a_long_prefill_keeps_the_connection_alive(
    monkeypatch: pytest.MonkeyPatch, case: tuple[str, dict[str, Any], str]
) -> None:
    """While nothing can be said, each API sends what its clients skip: not all count comments.

    Comments say how much of the prompt is computed.
    """
    path, fields, sign = case
    monkeypatch.setattr(app_module, "_KEEP_ALIVE_S", 0.01)
    client = FakeClient(RuntimeFailure("enough"), words=1, silence=True)
    pieces: list[str] = []

    def hear(piece: str) -> None:
        pieces.append(piece)
        if sum(sign in one for one in pieces) == 3:
            client.speak.set()

    _, text = ask(client, {**BODY, **fields, "stream": True}, path=path, when=hear)
    silence, _, _ = text.partition("word")
    assert silence.count(sign) >= 3
    assert silence.count(": prefill 1024 of 6000 tokens\n\n") >= 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_who_leaves_cancels(monkeypatch: pytest.MonkeyPatch, *, stream: bool) -> None:
    """The orchestrator is told as soon as the client is gone, in the middle of a silence too."""
    monkeypatch.setattr(app_module, "_KEEP_ALIVE_S", 0.01)
    client = FakeClient(RuntimeFailure("never reached"), silence=True)
    leave = 2 if stream else 10**6
    if not stream:
        monkeypatch.setattr(app_module, "wait_for_disconnect", _at_once)
    ask(client, {**BODY, "stream": stream}, leave_after=leave)
    assert client.closed


def test_who_stops_listening_cancels() -> None:
    """Whoever leaves between two events closes the source, and with it the request."""

    async def listen() -> bool:
        client = FakeClient(RuntimeFailure("never reached"), words=5)
        source = client.generate(Generate(request=1))
        never = asyncio.ensure_future(asyncio.sleep(60))
        events = watch_events(source, never, 1.0)
        await anext(events)
        await events.aclose()
        never.cancel()
        return client.closed

    assert asyncio.run(listen())


async def send(application: Any, body: dict[str, Any]) -> int:
    """The status of a request on a loop that is shared with others."""
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/chat/completions",
        "raw_path": b"", "query_string": b"", "server": ("localhost", 80), "scheme": "http",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("localhost", 1),
    }  # fmt: skip
    statuses: list[int] = []
    bodies = [json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def take(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await application(scope, receive, take)
    return statuses[0]


async def _at_once(receive: Any) -> None:
    await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:8080"}, 429),
        ({"host": "127.0.0.1:8080"}, 429),
        ({"host": "[::1]:8080"}, 429),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:8080"}, 403),
        ({"host": ""}, 403),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_pages_cannot_point_their_name_here(headers: dict[str, str], status: int) -> None:
    """Without a key, a request must be addressed to this machine by a name of its own."""
    assert ask(FakeClient(Busy("full")), BODY, headers=headers)[0] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 429),
        ({"origin": "http://localhost"}, 429),
        ({"origin": "http://friend.example"}, 429),
        ({"origin": "http://FRIEND.example/"}, 429),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost.evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 429),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 429),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["", "secret"], ids=["no key", "key"])
def test_pages_of_others_stay_outside(headers: dict[str, str], status: int, key: str) -> None:
    """A page says where it is from, or can only send what is no JSON; both are refused.

    With a key too: a browser may know it from elsewhere.
    """
    settings = GatewaySettings(
        lifeline=0, listener=0, models=MODELS,
        allowed_origins=["http://friend.example"],
    )  # fmt: skip
    application = Gateway(settings, lambda _: cast("Any", FakeClient(Busy("full")))).app(key)
    given = {"authorization": f"Bearer {key}", **headers}
    assert ask(None, BODY, headers=given, application=application)[0] == status


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models"])
def test_pages_of_others_read_nothing(path: str) -> None:
    """Nor may they look at the server's state; following a link to the page is allowed."""
    client = FakeClient(Busy("full"))
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert ask(client, {}, path=path, method="GET", headers=headers)[0] == 403
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert ask(client, {}, path=path, method="GET", headers=followed)[0] != 403


@pytest.mark.parametrize("given", ["secret", "wrong"])
def test_the_key_may_come_as_anthropic_sends_it(given: str) -> None:
    """In a header of its own, with errors of that API's shape."""
    path = "/v1/messages"
    status, text = ask(
        FakeClient(Busy("full")), {**BODY, "max_tokens": 1}, key="secret", path=path,
        headers={"x-api-key": given},
    )  # fmt: skip
    right = given == "secret"
    assert status == (429 if right else 401)
    error = json.loads(text)
    kind = "rate_limit_error" if right else "authentication_error"
    assert (error["type"], error["error"]["type"]) == ("error", kind)


def _nest(depth: int) -> Any:
    value: Any = {"type": "object"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "deep schema": ("/v1/chat/completions", {
        "response_format": {"type": "json_schema", "json_schema": {"schema": _nest(100)}}}),
    "wide schema": ("/v1/chat/completions", {"response_format": {
        "type": "json_schema", "json_schema": {"schema": {"enum": list(range(60_000))}}}}),
    "deep template option": ("/v1/chat/completions", {"chat_template_kwargs": {"a": _nest(100)}}),
    "many messages": ("/v1/chat/completions", {"messages": BODY["messages"] * 5000}),
    "many tools": ("/v1/chat/completions", {
        "tools": [{"type": "function", "function": {"name": "a"}}] * 600}),
    "many choices": ("/v1/chat/completions", {"n": 129}),
    "many answers": ("/v1/completions", {"prompt": ["a"] * 20, "n": 16}),
    "long stop string": ("/v1/chat/completions", {"stop": ["a" * 2000]}),
    "tiny penalty": ("/v1/chat/completions", {"repetition_penalty": 1e-40}),
    "huge penalty": ("/v1/chat/completions", {"repetition_penalty": 1e30}),
    "huge temperature": ("/v1/chat/completions", {"temperature": 1e308}),
    "huge bias": ("/v1/chat/completions", {"logit_bias": {"5": 1e300}}),
    "bias of a huge token": ("/v1/chat/completions", {"logit_bias": {"9" * 40: 1}}),
    "deep tool": ("/v1/messages", {
        "max_tokens": 1, "tools": [{"name": "a", "input_schema": _nest(100)}]}),
    "deep tool of a response": ("/v1/responses", {
        "input": "a", "tools": [{"type": "function", "name": "a", "parameters": _nest(100)}]}),
    "unreadable tool": ("/v1/responses", {"input": "a", "tools": [{"type": 5}]}),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE)
def test_requests_are_bounded(case: tuple[str, dict[str, Any]]) -> None:
    """What is too deep, too many or makes no sense is a 400 with a reason, and goes no further."""
    path, fields = case
    client = FakeClient(RuntimeFailure("it was asked"))
    status, text = ask(client, {**BODY, **fields}, path=path)
    assert status == 400
    assert json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 4_000_000,
        b'{"messages": [{"role": "user", "content": "' + b"\\\\" * 900_000 + b'"}]}',
        b'{"x": [' + b"[]," * 1_300_000 + b"[]]}",
        b'{"messages": [' + b"{}," * 1_300_000 + b"{}]}",
        b'{"messages": [{"role": "user", "content": "a"}], ' + b'"a": 1, ' * 400_000 + b'"b": 1}',
    ],
    ids=["deep", "escapes", "lists", "messages", "names"],
)
def test_a_large_body_is_read_at_once(body: bytes) -> None:
    """Four megabytes of anything are refused or read while nobody waits long: it is timed by
    what the loop's thread computes, so that a busy machine does not matter."""
    before = time.thread_time()
    with contextlib.suppress(ApiError):
        decode_body(body, ChatRequest)
    assert time.thread_time() - before < 2.0


@pytest.mark.parametrize(
    ("given", "status"),
    [("Bearer secret", 429), ("bearer secret", 429), ("Bearer secre", 401), ("Basic secret", 401),
     ("secret", 401), ("", 401)],
)  # fmt: skip
def test_the_key_decides(given: str, status: int) -> None:
    """Exactly the key, as a bearer token; then the host does not matter."""
    headers = {"authorization": given, "host": "anything.example"}
    assert ask(FakeClient(Busy("full")), BODY, key="secret", headers=headers)[0] == status


def test_a_stranger_learns_little_from_health() -> None:
    """Whether it works, but neither models nor processes."""
    _, text = ask(FakeClient(Busy("full")), {}, key="secret", path="/health", method="GET")
    assert "large" not in text


def test_haste_is_refused_for_a_while() -> None:
    """So many requests a minute from an address; then 429 with the time to wait, and no answer."""
    settings = GatewaySettings(lifeline=0, listener=0, models=MODELS, rate_limit=2)
    application = Gateway(settings, lambda _: cast("Any", FakeClient(RuntimeFailure("asked")))).app(
        ""
    )
    asked = [ask(None, BODY, application=application) for _ in range(3)]
    assert [status for status, _ in asked] == [500, 500, 429]
    error = json.loads(asked[-1][1])["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert ask(None, {}, application=application, path="/v1/models", method="GET")[0] == 200


@given(limit=st.integers(1, 20), gaps=st.lists(st.floats(0, 60), max_size=80))
def test_no_minute_has_more_than_twice_its_requests(limit: int, gaps: list[float]) -> None:
    """A full bucket and what flows in; who waits as told is let in, and others do not matter."""
    rate, now, let_in = RateLimit(limit), 0.0, list[float]()
    for gap in gaps:
        now += gap
        rate.wait_s("another", now)
        wait = rate.wait_s("client", now)
        if wait:
            assert 0 < wait <= 60 / limit + 1e-6
            now += wait + 1e-6
            assert rate.wait_s("client", now) == 0
        let_in.append(now)
    assert all(sum(t <= other < t + 60 for other in let_in) <= 2 * limit for t in let_in)


def test_no_limit_is_none() -> None:
    """And nobody is remembered for it."""
    rate = RateLimit(0)
    assert [rate.wait_s("client", 0.0) for _ in range(1000)] == [0.0] * 1000


def test_many_clients_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: the one that was silent longest begins anew."""
    monkeypatch.setattr("services.gateway.auth._MOST_CLIENTS", 2)
    rate = RateLimit(1)
    assert [rate.wait_s(client, 0.0) > 0 for client in "aabbca"] == [
        False, True, False, True, False, False,
    ]  # fmt: skip


def test_a_key_that_is_gone_opens_no_door(tmp_path: Path) -> None:
    """A key file that is missing or empty (a full disk) ends the gateway; it is not "no key"."""
    empty = tmp_path / "api-key"
    empty.touch()
    for file in (empty, tmp_path / "missing"):
        settings = GatewaySettings(
            lifeline=0, models=MODELS, listener=-1, hosts=[], key_file=str(file)
        )
        with pytest.raises(UsageError, match="the API key"):
            run(settings)


def test_clients_of_one_address_are_told_apart_by_their_keys() -> None:
    """Whichever header has the key; what the orchestrator gets is a digest of it."""
    client = ScriptedClient(*"abcd")
    keys = [{}, {"authorization": "Bearer one"}, {"x-api-key": "one"}, {"x-api-key": "two"}]
    with serving(client) as url:
        for headers in keys:
            body = json.dumps(BODY).encode()
            given = {"Content-Type": "application/json", **headers}
            asked = urllib.request.Request(f"{url}/v1/chat/completions", body, given)  # noqa: S310
            urllib.request.urlopen(asked, timeout=60).close()  # noqa: S310
    plain, one, again, other = (request.client for request in client.requests)
    assert plain == "127.0.0.1"
    assert one == again
    assert len({plain, one, other}) == 3
    assert "one" not in one
