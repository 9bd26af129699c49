"""An orchestrator that does not read is replaced; the supervisor goes on."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.settings.settings import StackSettings
from launch.stack.child import Child
from launch.stack.orchestrator_link import OrchestratorLink
from launch.stack.watchdog import Watchdog, _key
from protocol.messages import ServiceDown, Status, ToOrchestrator
from protocol.transport import channel
from protocol.transport.address import ipc_address
from protocol.transport.channel import Hub
from protocol.transport.codec import Decoder
from tests.support.stack import DEADLINE_S

DOWN = ServiceDown(role="drafter", pid=7, reason="x" * 10_000, final=False)


class Orchestrator(Child):
    """A process that lives, for the watchdog."""

    role = "orchestrator"
    pid = 1

    def __init__(self) -> None:
        """Starts nothing."""

    @property
    def exit_code(self) -> None:
        """None: it runs."""


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of an orchestrator, over queues that are soon full."""
    monkeypatch.setattr(channel, "_QUEUE", 2)
    return ipc_address(str(tmp_path / "clients.sock"))


@pytest.fixture
def orchestrator(address: str) -> Iterator[Hub[ToOrchestrator]]:
    with Hub(address, Decoder(ToOrchestrator)) as hub:
        yield hub


def fill(link: OrchestratorLink) -> str:
    """Send until a message is lost; the reason."""
    for _ in range(100_000):
        link.report_service_down(DOWN)
        if failure := link.take_failure():
            return failure
    raise AssertionError("the queue is never full")


def test_a_full_queue_is_a_failure_of_the_orchestrator(
    address: str, orchestrator: Hub[ToOrchestrator]
) -> None:
    """Nothing raises; the reason is given once, and the next connection works."""
    with OrchestratorLink(address) as link:
        assert "stopped reading" in fill(link)
        assert link.take_failure() == ""
        while orchestrator.receive():
            pass  # a new orchestrator reads
        link.report_service_down(DOWN)
        end = time.monotonic() + DEADLINE_S
        while (received := orchestrator.receive()) is None:
            assert time.monotonic() < end
            orchestrator.ready(0.1)
        assert received[1] == DOWN


def test_an_invalid_message_is_a_failure_of_the_orchestrator(
    address: str, orchestrator: Hub[ToOrchestrator]
) -> None:
    """What it sends cannot be read: it is replaced, too."""
    with OrchestratorLink(address) as link:
        link.report_service_down(DOWN)
        assert orchestrator.ready(DEADLINE_S)
        received = orchestrator.receive()
        assert received is not None
        orchestrator.send(received[0], b"what is this?")
        assert link.await_status(DEADLINE_S) is None
        assert link.take_failure() != ""


def test_the_watchdog_has_a_stalled_orchestrator_replaced(
    address: str, orchestrator: Hub[ToOrchestrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks again and again, and names the orchestrator once its questions are lost."""
    monkeypatch.setattr("launch.stack.watchdog._ASK_S", 0.0)
    monkeypatch.setattr("launch.stack.watchdog.is_stopped", lambda pid: False)
    settings = StackSettings(hang_timeout_s=sys.maxsize)
    with Watchdog(address, settings) as watchdog:
        for _ in range(200_000):
            if found := watchdog.look([Orchestrator()], set()):
                break
    assert list(found) == ["orchestrator"]
    assert "stopped reading" in found["orchestrator"]


def test_the_next_orchestrator_has_less_time_for_its_first_answer(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that paralysed one may paralyse the next, before it has answered anything."""
    monkeypatch.setattr("launch.stack.watchdog.is_stopped", lambda pid: False)
    settings = StackSettings(hang_timeout_s=4.0, start_timeout_s=99.0)
    with Watchdog(address, settings) as watchdog:
        watchdog.look([Orchestrator()], set())
        assert watchdog._answering.limit_s(_key(Orchestrator())) == 99.0
        watchdog.status = Status(pid=1, model="", services=[], active=0, waiting=0)
        watchdog.look([], set())
        watchdog.look([Orchestrator()], set())
        assert watchdog._answering.limit_s(_key(Orchestrator())) == 15.0
