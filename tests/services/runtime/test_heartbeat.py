"""The heartbeat of a service."""

import pytest

from protocol.errors import DeadlineExceeded
from protocol.messages import FromService, Heartbeat
from services.runtime.heartbeat import HeartbeatTimer


class Body:
    """A pulse with a clock of the test's, and what it said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[FromService] = []
        self.heartbeat = HeartbeatTimer(self, lambda: self.now)

    def send(self, message: FromService) -> None:
        self.sent.append(message)

    def after(self, seconds: float, sequence: int = 0) -> None:
        self.now += seconds
        self.heartbeat.beat(sequence)


def test_it_beats_once_a_second() -> None:
    """However often it is asked, one beat a second, which names the work."""
    body = Body()
    for _ in range(30):
        body.after(0.25, sequence=3)
    assert [Heartbeat(3)] * 7 == body.sent


def test_what_is_said_is_a_beat() -> None:
    """After any message the next beat is due a second later."""
    body = Body()
    body.after(0.75)
    body.heartbeat.on_send()
    body.after(0.75)
    assert body.sent == []
    assert body.heartbeat.wait_s == 0.25


def test_a_silent_orchestrator_is_dead() -> None:
    """Sixty beats without an answer end the service; an answer forgives all of them."""
    body = Body()
    for _ in range(60):
        body.after(1.0)
    body.heartbeat.on_receive()
    for _ in range(60):
        body.after(1.0)
    with pytest.raises(DeadlineExceeded, match="silent for 60 s"):
        body.after(1.0)


def test_a_long_call_is_announced() -> None:
    """At once, with ten times what it is expected to take; a short one is not."""
    body = Body()
    body.heartbeat.beat(3, expected_s=1.0)
    assert body.sent == []
    body.heartbeat.beat(3, expected_s=16.0)
    body.heartbeat.beat(3, expected_s=1e6)
    assert body.sent == [Heartbeat(3, 160.0), Heartbeat(3, 3600.0)]
