"""What a service prepares between requests: when, in which steps, and what is said of it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from protocol.messages import (
    CloseSequence,
    FromService,
    Heartbeat,
    Hello,
    Identify,
    Message,
    PassTimes,
    Prefilled,
    PreparationState,
    Prepared,
    Stop,
    ToService,
    Welcome,
)
from protocol.transport.address import ipc_address
from protocol.transport.channel import Hub
from protocol.transport.codec import Decoder
from services.runtime.inbox import Inbox
from services.runtime.loop import serve
from services.runtime.preparation import Preparer, Stage, Steps, run_all
from tests.services.runtime.test_loop import (
    IDENTITY,
    PATIENCE_S,
    Certain,
    FakeService,
    heard,
    opening,
)

TIMES = PassTimes(chains={1: 7.0})


class Gate:
    """A stage whose steps wait for the test."""

    def __init__(self, steps: int) -> None:
        self.begun, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self._steps, self.taken = steps, 0

    def __call__(self) -> Steps[None]:
        for _ in range(self._steps):
            self.begun.release()
            assert self._go.acquire(timeout=PATIENCE_S)
            self.taken += 1
            yield

    def let(self, steps: int = 1) -> None:
        """Let so many steps end, each after it has begun."""
        for _ in range(steps):
            assert self.begun.acquire(timeout=PATIENCE_S)
            self.end()

    def end(self) -> None:
        """Let the step in work end."""
        self._go.release()


class Service(NamedTuple):
    """A service that prepares, and the orchestrator's end."""

    hub: Hub[FromService]
    peer: bytes
    hello: Hello
    channel: Certain

    def send(self, *messages: Message) -> None:
        """All of them arrive before the service's next step."""
        self.channel.sent += len(messages)
        for message in messages:
            assert self.hub.send(self.peer, message)

    def receive(self) -> FromService:
        """The next message that is not a beat."""
        _, message = heard(self.hub, but=Heartbeat)
        assert not isinstance(message, Exception)
        return message


@contextmanager
def preparing(folder: str, *stages: Stage) -> Iterator[Service]:
    """A service with these stages; its verifier's times are found by the stage `times`."""
    identity = replace(IDENTITY)

    def find_times() -> Steps[None]:
        yield
        identity.pass_times = TIMES

    every = [one if one.name != "times" else Stage("times", find_times) for one in stages]
    address, channels = ipc_address(folder), list[Certain]()

    def run() -> None:
        with Certain(address, Decoder(ToService)) as channel:
            channels.append(channel)
            serve(channel, identity, FakeService(), preparer=Preparer(every))

    with ExitStack() as stack:
        hub: Hub[FromService] = stack.enter_context(Hub(address, Decoder(FromService)))
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        peer, hello = heard(hub)
        assert isinstance(hello, Hello)
        service = Service(hub, peer, hello, channels[0])
        yield service
        service.send(Stop())
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("services.runtime.heartbeat.BEAT_S", 1000.0)
    monkeypatch.setattr("services.runtime.loop._QUIET_S", 0.001)
    return str(tmp_path_factory.mktemp("z") / "s")


def found(stage: str, done: int, total: int, **fields: PassTimes) -> Prepared:
    return Prepared(preparation=PreparationState(done=done, total=total, stage=stage), **fields)


def test_what_is_found_follows_hello(folder: str) -> None:
    """Hello says what is to come; each stage is reported, and what is known by then."""
    gate = Gate(2)
    with preparing(folder, Stage("traces", gate), Stage("times", Gate(0))) as service:
        assert service.hello.preparation == PreparationState(total=2, stage="traces")
        assert not service.hello.preparation.is_complete
        service.send(Welcome())
        gate.let(2)
        assert service.receive() == found("times", 1, 2)
        last = service.receive()
        assert last == found("", 2, 2, pass_times=TIMES)
        assert isinstance(last, Prepared)
        assert last.preparation.is_complete
        service.send(Identify())  # a new orchestrator
        again = service.receive()
        assert isinstance(again, Hello)
        assert (again.preparation, again.pass_times) == (last.preparation, TIMES)
        service.send(Welcome())


def test_a_request_comes_between_two_steps(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered after the step in work, and no other begins while its sequence is open."""
    waits, wait = threading.Semaphore(0), Inbox.wait

    def note(inbox: Inbox) -> None:
        waits.release()
        wait(inbox)

    monkeypatch.setattr(Inbox, "wait", note)
    gate = Gate(3)
    with preparing(folder, Stage("traces", gate)) as service:
        service.send(Welcome())
        gate.let(1)
        assert gate.begun.acquire(timeout=PATIENCE_S)  # the second one
        service.send(opening(1))
        gate.end()
        assert isinstance(service.receive(), Prefilled)
        assert waits.acquire(timeout=PATIENCE_S), "it does not wait for the sequence's next message"
        assert gate.taken == 2
        service.send(CloseSequence(sequence=1))
        gate.let(1)
        assert service.receive() == found("", 1, 1)
        assert gate.taken == 3


def test_each_request_is_followed_by_a_step(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks without a pause does not hold preparation up for ever."""
    monkeypatch.setattr("services.runtime.loop._QUIET_S", PATIENCE_S)
    gate = Gate(2)
    with preparing(folder, Stage("traces", gate)) as service:
        service.send(Welcome())
        for taken in (0, 1, 2):
            service.send(opening(1))
            assert isinstance(service.receive(), Prefilled)
            service.send(CloseSequence(sequence=1))
            if taken < 2:
                gate.let(1)
        assert gate.taken == 2
        assert service.receive() == found("", 1, 1)


def test_a_service_that_is_never_idle_prepares_between_rounds(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changes no computation goes on while a sequence is open; the rest waits."""
    monkeypatch.setattr("services.runtime.loop._BUSY_S", 0.0)
    monkeypatch.setattr("services.runtime.loop._APART_S", 0.0)
    harmless, other = Gate(2), Gate(1)
    stages = (Stage("times of passes", harmless, between_rounds=True), Stage("traces", other))
    with preparing(folder, *stages) as service:
        service.send(Welcome(), opening(1))
        assert isinstance(service.receive(), Prefilled)
        harmless.let(2)
        assert service.receive() == found("traces", 1, 2)
        assert other.taken == 0
        service.send(CloseSequence(sequence=1))
        other.let(1)
        assert service.receive() == found("", 2, 2)


def test_a_stage_that_fails_is_left_out(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Steps[None]:
        yield
        raise ValueError("no room")

    with preparing(folder, Stage("traces", fail), Stage("times", Gate(0))) as service:
        service.send(Welcome())
        assert service.receive() == found("times", 1, 2)
        assert service.receive() == found("", 2, 2, pass_times=TIMES)
    assert "preparing traces failed" in caplog.text


def test_steps_may_run_at_once() -> None:
    def steps() -> Steps[int]:
        yield
        yield
        return 5

    assert run_all(steps()) == 5
