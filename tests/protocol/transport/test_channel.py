"""Sockets with deadlines, over real ipc sockets within one process."""

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from protocol.errors import DeadlineExceeded, ProtocolError, RuntimeFailure
from protocol.messages import (
    PROTOCOL_VERSION,
    CloseSequence,
    Failed,
    FromService,
    Hello,
    Prefilled,
    Rejected,
    Stop,
    ToService,
    Welcome,
)
from protocol.process.deadline import Deadline
from protocol.transport.address import ipc_address
from protocol.transport.channel import Channel, Hub, Poller
from protocol.transport.codec import Decoder, encode

PATIENCE_S = 60.0
FAREWELL = Failed(sequence=1, error="bye")


class Line(NamedTuple):
    """A hub and a channel to it, and the peer by which the hub knows the channel."""

    hub: Hub[FromService]
    channel: Channel[ToService]
    peer: bytes


def received(hub: Hub[FromService]) -> tuple[bytes, FromService | ProtocolError]:
    """The next message, which is on its way."""
    assert hub.ready(PATIENCE_S)
    message = hub.receive()
    assert message is not None
    return message


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return ipc_address(str(tmp_path_factory.mktemp("z") / "s"))


@pytest.fixture
def line(address: str) -> Iterator[Line]:
    hub: Hub[FromService] = Hub(address, Decoder(FromService))
    channel: Channel[ToService] = Channel(address, Decoder(ToService))
    with hub, channel:
        channel.send(FAREWELL)
        peer, message = received(hub)
        assert message == FAREWELL
        yield Line(hub, channel, peer)


def test_messages_travel_both_ways_in_order(line: Line) -> None:
    """Both ends receive what the other sent, in the order in which it was sent."""
    there = [Prefilled(sequence=i, length=i, prefill_ms=0.5) for i in range(50)]
    for message in there:
        line.channel.send(message)
    assert [(line.peer, message) for message in there] == [received(line.hub) for _ in there]
    back = [CloseSequence(sequence=i) for i in range(50)]
    assert all(line.hub.send(line.peer, message) for message in back)
    assert back == [line.channel.receive(PATIENCE_S, "answer") for _ in back]


def test_a_new_connection_is_told_of_after_what_waits(line: Line, address: str) -> None:
    """A message that is there does not hide that the other end may be a new one."""
    assert not line.channel.await_news(0.0)
    assert line.hub.send(line.peer, Welcome())
    assert line.channel.ready(PATIENCE_S)
    line.hub.close()
    with Hub[FromService](address, Decoder(FromService)) as second:
        line.channel.send(FAREWELL)
        peer, _ = received(second)
        assert line.channel.await_news(PATIENCE_S)
        assert line.channel.receive(0.0, "welcome") == Welcome()
        started = time.monotonic()
        assert not line.channel.await_news(PATIENCE_S)
        assert time.monotonic() - started < PATIENCE_S / 2
        assert second.send(peer, Welcome())
        assert line.channel.await_news(PATIENCE_S)  # it is told of once


def test_peers_are_told_apart(line: Line, address: str) -> None:
    """An answer goes to the peer that it is meant for, and to no other."""
    with Channel[ToService](address, Decoder(ToService)) as other:
        other.send(FAREWELL)
        peer, _ = received(line.hub)
        assert peer != line.peer
        assert line.hub.send(peer, Stop())
        assert line.hub.send(line.peer, Welcome())
        assert Stop() == other.receive(PATIENCE_S, "answer")
        assert Welcome() == line.channel.receive(PATIENCE_S, "answer")


def test_a_wait_ends_at_its_deadline(line: Line) -> None:
    """Nothing in time is a DeadlineExceeded that names what was awaited, and for how long."""
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"no word from the moon within 0\.02 s"):
        line.channel.receive(0.02, "word from the moon")
    assert 0.015 < time.monotonic() - started < PATIENCE_S


def test_a_passed_deadline_does_not_wait_for_ever(line: Line) -> None:
    """Zero or negative seconds mean: now or never."""
    with pytest.raises(DeadlineExceeded):
        line.channel.receive(-1.0, "answer")
    assert not line.hub.ready(-1.0)
    Poller([line.hub, line.channel]).wait(-1.0)


def test_nothing_waiting_is_none(line: Line) -> None:
    """A hub without a waiting message says so at once."""
    assert line.hub.receive() is None


def test_unknown_peers_cannot_be_reached(line: Line) -> None:
    """Sending to a peer that never was is False, not an error and not a silent drop."""
    assert line.hub.send(b"nobody", Stop()) is False


def test_vanished_peers_cannot_be_reached(line: Line) -> None:
    """Soon after a peer is gone, sending to it is False."""
    line.channel.close()
    deadline = Deadline(PATIENCE_S)
    while line.hub.send(line.peer, Stop()):
        assert not deadline.passed
        line.hub.ready(0.005)
    assert line.hub.send(line.peer, Stop()) is False


def test_peers_that_do_not_read_lose_messages(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """With a full queue, a hub's send is False and a channel's is a RuntimeFailure."""
    monkeypatch.setattr("protocol.transport.channel._QUEUE", 2)
    large = Rejected("x" * 1_000_000)
    hub: Hub[FromService] = Hub(address, Decoder(FromService))
    channel: Channel[ToService] = Channel(address, Decoder(ToService))
    with hub, channel:
        channel.send(FAREWELL)
        peer, _ = received(hub)
        assert not all(hub.send(peer, large) for _ in range(200))

        def send_many() -> None:
            for _ in range(200):
                channel.send(large)

        with pytest.raises(RuntimeFailure, match="stopped reading"):
            send_many()
        channel.socket.linger = hub.socket.linger = 0


def test_a_patient_channel_waits_for_a_slow_peer(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """All messages arrive, though the queue is full until the peer begins to read."""
    monkeypatch.setattr("protocol.transport.channel._QUEUE", 2)
    large = Rejected("x" * 100_000)
    hub: Hub[FromService] = Hub(address, Decoder(FromService))
    channel: Channel[ToService] = Channel(address, Decoder(ToService), send_timeout_s=60.0)
    with hub, channel:
        sent: list[int] = []

        def send_many() -> None:
            for number in range(200):
                channel.send(large)
                sent.append(number)

        sending = threading.Thread(target=send_many, daemon=True)
        sending.start()
        for _ in range(200):
            received(hub)
        sending.join(60.0)
        assert len(sent) == 200


@pytest.mark.parametrize(
    "data", [b"", b"nonsense", encode(Stop()), encode(FAREWELL) + b"\x00"], ids=str
)
def test_bad_messages_reach_a_hub_as_their_error(line: Line, data: bytes) -> None:
    """A hub receives a bad message as a ProtocolError beside its peer, and goes on."""
    line.channel.socket.send(data)
    line.channel.send(FAREWELL)
    peer, message = received(line.hub)
    assert line.peer == peer
    assert isinstance(message, ProtocolError)
    assert (line.peer, FAREWELL) == received(line.hub)


def test_a_hub_may_limit_what_a_peer_sends(line: Line) -> None:
    """A longer message is not decoded, and is an error of its sender's; others are not touched."""
    line.hub.limit_of = lambda peer: 20 if peer == line.peer else 999
    line.channel.send(FAREWELL)
    peer, error = received(line.hub)
    assert peer == line.peer
    assert isinstance(error, ProtocolError)
    assert "exceeds the limit of 20" in str(error)
    line.hub.limit_of = lambda _: 999
    line.channel.send(FAREWELL)
    assert received(line.hub) == (line.peer, FAREWELL)


def test_extra_frames_are_an_error(line: Line) -> None:
    """A message of several frames is a ProtocolError that counts them."""
    line.channel.socket.send_multipart([encode(FAREWELL), b"more"])
    peer, message = received(line.hub)
    assert line.peer == peer
    assert isinstance(message, ProtocolError)
    assert str(message) == "expected one frame, got 2"


def test_bad_messages_reach_a_channel_as_an_exception(line: Line) -> None:
    """A channel raises ProtocolError for a bad message, and goes on."""
    line.hub.socket.send_multipart([line.peer, b"nonsense"])
    line.hub.send(line.peer, Welcome())
    with pytest.raises(ProtocolError):
        line.channel.receive(PATIENCE_S, "answer")
    assert Welcome() == line.channel.receive(PATIENCE_S, "answer")


def test_messages_before_the_hub_is_there_are_kept(address: str) -> None:
    """A channel may connect and send before its hub is bound."""
    with Channel[ToService](address, Decoder(ToService)) as channel:
        channel.send(FAREWELL)
        with Hub[FromService](address, Decoder(FromService)) as hub:
            assert received(hub)[1] == FAREWELL


def test_a_poller_wakes_for_any_of_its_endpoints(line: Line, address: str) -> None:
    """Waiting for several endpoints ends as soon as one of them can be received from."""
    with Hub[FromService](address + "2", Decoder(FromService)) as quiet:
        line.channel.send(FAREWELL)
        started = time.monotonic()
        Poller([quiet, line.hub]).wait(PATIENCE_S)
        assert time.monotonic() - started < PATIENCE_S
        assert (line.peer, FAREWELL) == received(line.hub)


def test_closing_twice_is_safe(address: str) -> None:
    """An endpoint may be closed again."""
    hub: Hub[FromService] = Hub(address, Decoder(FromService))
    hub.close()
    hub.close()


def test_long_socket_paths_are_refused() -> None:
    """A path that a socket cannot have is a RuntimeFailure that names the way out."""
    assert ipc_address("/" + "x" * 102) == "ipc:///" + "x" * 102
    with pytest.raises(RuntimeFailure, match="longer than 103 bytes; set SSD_RUN_DIR"):
        ipc_address("/" + "x" * 103)
    with pytest.raises(RuntimeFailure, match="longer than 103 bytes"):
        ipc_address("/" + "ü" * 52)


def test_deadlines_pass() -> None:
    """A deadline counts down and never below zero."""
    future, past = Deadline(1000.0), Deadline(0.0)
    assert not future.passed
    assert 990.0 < future.remaining <= 1000.0
    assert past.passed
    assert past.remaining == 0.0


def test_a_stranger_says_little(address: str) -> None:
    """Who has not been accepted can send an introduction, and nothing that costs time to read."""
    hub: Hub[FromService] = Hub(address, Decoder(FromService), stranger_bytes=300)
    channel: Channel[ToService] = Channel(address, Decoder(ToService))
    with hub, channel:
        channel.send(Failed(sequence=1, error="x" * 400))
        peer, error = received(hub)
        assert isinstance(error, ProtocolError)
        assert "before the handshake exceeds the limit of 300" in str(error)
        channel.send(Failed(sequence=1, error="x"))
        assert received(hub) == (peer, Failed(sequence=1, error="x"))
        hub.accept(peer)
        channel.send(Failed(sequence=1, error="x" * 400))
        assert received(hub) == (peer, Failed(sequence=1, error="x" * 400))


@pytest.mark.parametrize("field", ["backend", "model", "tokenizer_fingerprint", "compute_unit"])
def test_names_are_bounded(field: str) -> None:
    """They are shown to every client that asks for the status."""
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        role="drafter",
        pid=1,
        backend="b",
        model="m",
        tokenizer_fingerprint="",
        vocabulary_size=0,
        context_length=0,
        compute_unit="cpu",
        max_draft_tokens=8,
    )
    decoder: Decoder[FromService] = Decoder(FromService)
    assert decoder.decode(encode(hello)) == hello
    with pytest.raises(ProtocolError, match=field):
        decoder.decode(encode(replace(hello, **{field: "x" * 5000})))
