"""HTTP connections within limits, on a transport that writes down what it is told."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from services.gateway.http import connections
from services.gateway.http.connections import HttpConnection, Turns, count_connections

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
Make = Callable[[], HttpConnection]


class FakeTransport(asyncio.Transport):
    """Nobody is at its other end."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = ""

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = self.closed or "closed"

    def abort(self) -> None:
        self.closed = "aborted"

    def is_closing(self) -> bool:
        return bool(self.closed)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture
def make(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Connections of one server, whose application never answers."""

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive, send
        await asyncio.Event().wait()

    monkeypatch.setattr(HttpConnection, "most", 2)
    monkeypatch.setattr(HttpConnection, "turns", Turns())
    config, state = Config(wait, log_config=None, proxy_headers=False), ServerState()
    config.load()

    def create() -> HttpConnection:
        connection = HttpConnection(config, state, {}, loop)
        connection.connection_made(FakeTransport())
        return connection

    return create


def say(loop: asyncio.AbstractEventLoop, connection: HttpConnection, data: bytes) -> None:
    """Send this, and let the loop turn until it is parsed."""

    async def deliver() -> None:
        connection.data_received(data)
        while connection._sent:
            await asyncio.sleep(0)

    loop.run_until_complete(deliver())


def transport_of(connection: HttpConnection) -> FakeTransport:
    transport = connection.transport
    assert isinstance(transport, FakeTransport)
    return transport


def test_a_new_connection_does_not_give_way(make: Make) -> None:
    """Its request may be on its way, so the next one is refused."""
    first, second, refused = make(), make(), make()
    assert [transport_of(one).closed for one in (first, second, refused)] == ["", "", "closed"]
    assert transport_of(refused).written.startswith(b"HTTP/1.1 503 ")


def test_the_oldest_idle_connection_gives_way(
    make: Make, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one whose request is answered; half a head, or half a body, is idle too."""
    monkeypatch.setattr(connections, "_NEW_S", 0.0)
    answered, idle = make(), make()
    say(loop, answered, HEAD + b"content-length: 0\r\n\r\n")
    say(loop, idle, HEAD + b"content-length: 9\r\n\r\nhalf")
    third = make()
    assert [transport_of(one).closed for one in (answered, idle, third)] == ["", "aborted", ""]


def test_there_is_a_refusal_where_all_are_answered(
    make: Make, loop: asyncio.AbstractEventLoop
) -> None:
    """It says when to come again."""
    for _ in range(2):
        say(loop, make(), HEAD + b"content-length: 0\r\n\r\n")
    refused = transport_of(make())
    head, _, body = refused.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in head
    assert f"content-length: {len(body)}".encode() in head
    assert refused.closed == "closed"


def test_half_a_request_is_not_waited_for(
    make: Make, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a request that is answered keeps its connection."""
    answered = make()
    say(loop, answered, HEAD + b"content-length: 0\r\n\r\n")
    monkeypatch.setattr(connections, "_HEAD_S", 0.0)
    half = make()
    say(loop, half, HEAD)
    loop.run_until_complete(asyncio.sleep(0))
    assert [transport_of(one).closed for one in (answered, half)] == ["", "aborted"]


def test_what_has_come_is_not_late(
    make: Make, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it waits to be parsed beside others."""
    monkeypatch.setattr(connections, "_HEAD_S", 0.0)
    monkeypatch.setattr(connections, "_SLICE", 1)

    async def deliver() -> HttpConnection:
        connection = make()
        connection.data_received(HEAD + b"content-length: 0\r\n\r\n")
        while connection._sent:
            await asyncio.sleep(0)
        return connection

    assert transport_of(loop.run_until_complete(deliver())).closed == ""


@pytest.fixture
def unread(
    make: Make, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """A connection whose client stops reading its answer at once."""
    monkeypatch.setattr(connections, "_STALL_S", 0.0)
    monkeypatch.setattr(connections, "_NEW_S", 0.0)
    created = []

    def create() -> HttpConnection:
        connection = make()
        say(loop, connection, HEAD + b"content-length: 0\r\n\r\n")
        connection.pause_writing()
        loop.run_until_complete(asyncio.sleep(0))
        created.append(connection)
        return connection

    yield create
    for connection in created:
        connection.connection_lost(None)


def test_a_client_may_pause(
    unread: Make, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer waits; when it reads again, it counts as any other; too long is too long."""
    client = unread()
    assert client.is_unread
    assert transport_of(client).closed == ""
    client.resume_writing()
    assert not client.is_unread
    assert client.is_answered
    monkeypatch.setattr(connections, "_UNREAD_S", 0.0)
    client.pause_writing()
    for _ in range(2):
        loop.run_until_complete(asyncio.sleep(0))
    assert transport_of(client).closed == "aborted"


def test_who_does_not_read_gives_way(
    make: Make, unread: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a new connection if there are too many, and to others that do not read either."""
    first, second = unread(), unread()
    third = make()
    assert [transport_of(one).closed for one in (first, second, third)] == ["aborted", "", ""]
    monkeypatch.setattr(HttpConnection, "most", 9)
    monkeypatch.setattr(connections, "_MOST_UNREAD", 1)
    fourth = unread()
    assert [transport_of(one).closed for one in (second, third, fourth)] == ["aborted", "", ""]


def test_tiny_chunks_are_refused(make: Make, loop: asyncio.AbstractEventLoop) -> None:
    """A body may come in chunks, but not in tens of thousands of one byte."""
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    good, bad = make(), make()
    say(loop, good, chunked + b"10\r\n" + b"x" * 16 + b"\r\n")
    say(loop, good, (b"10\r\n" + b"x" * 16 + b"\r\n") * 10_000)
    say(loop, bad, chunked + b"1\r\nx\r\n" * 30_000)
    assert transport_of(good).written == b""
    assert transport_of(bad).written.startswith(b"HTTP/1.1 400 ")


def test_connections_take_turns(make: Make, loop: asyncio.AbstractEventLoop) -> None:
    """Of what two have sent, no more than a slice of each is parsed at once."""
    one, other = make(), make()
    for connection in (one, other):
        say(loop, connection, HEAD + b"content-length: 1000000\r\n\r\n")
    lengths = []

    async def deliver() -> None:
        one.data_received(b"x" * 20_000)
        other.data_received(b"y" * 20_000)
        while one._sent or other._sent:
            await asyncio.sleep(0)
            lengths.append((len(one.cycle.body), len(other.cycle.body)))

    loop.run_until_complete(deliver())
    assert all(abs(a - b) <= connections._SLICE for a, b in lengths)
    assert lengths[-1] == (20_000, 20_000)


def test_who_leaves_before_its_turn_is_not_answered(
    make: Make, loop: asyncio.AbstractEventLoop
) -> None:
    """Its end is read at once, while more data has to wait."""
    gone, other = make(), make()

    async def deliver() -> None:
        other.data_received(HEAD)
        gone.data_received(HEAD + b"content-length: 0\r\n\r\n")
        assert not gone.flow.read_paused
        other.data_received(b"content-length: 0\r\n\r\n")
        assert other.flow.read_paused
        transport_of(gone).close()  # as asyncio does at the end
        while gone._sent or other._sent:
            await asyncio.sleep(0)

    loop.run_until_complete(deliver())
    assert (gone.is_answered, other.is_answered) == (False, True)


def test_there_are_fewer_connections_than_descriptors() -> None:
    """Each has a request that takes descriptors of its own."""
    for descriptors in (0, 256, 1024, 10_240, 2**20):
        assert 1 <= count_connections(descriptors) <= max(1, descriptors // 3)
