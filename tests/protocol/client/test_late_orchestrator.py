"""A client, and an orchestrator that takes its time to come back, over real sockets."""

import sys
import threading
import time

import pytest

from orchestrator.telemetry.recorder import Recorder
from protocol.client.client import Client
from protocol.client.request_session import RequestSession
from protocol.messages import Finished, Generate, Status, StatusRequest, Text, ToOrchestrator
from protocol.transport.address import ipc_address
from protocol.transport.channel import Hub
from protocol.transport.codec import Decoder

PATIENCE_S = 60.0
QUESTIONS = 5
REQUEST = Generate(request=1, tokens=[1, 2])


class Orchestrator:
    """Says who it is and counts what it is asked."""

    def __init__(self, address: str, pid: int) -> None:
        self.hub: Hub[ToOrchestrator] = Hub(address, Decoder(ToOrchestrator))
        self.pid = pid
        self.client = b""
        self.generates = 0
        self.questions = 0

    def serve(self, *, generates: int, questions: int) -> None:
        """Until it was asked so often."""
        end = time.monotonic() + PATIENCE_S
        while self.generates < generates or self.questions < questions:
            assert time.monotonic() < end
            received = self.hub.receive() if self.hub.ready(0.1) else None
            if received is None:
                continue
            self.client, message = received
            if isinstance(message, StatusRequest):
                self.questions += 1
                self.hub.send(self.client, self._status(message))
            self.generates += isinstance(message, Generate)

    def finish(self) -> Finished:
        """The end of the answer."""
        statistics = Recorder(0.0).summarise()
        end = Finished(request=1, reason="length", prompt_tokens=2, statistics=statistics)
        self.hub.send(self.client, end)
        return end

    def _status(self, request: StatusRequest) -> Status:
        return Status(
            pid=self.pid, model="", services=[], active=0, waiting=0, request=request.request,
            question=request.question, serving=self.generates > 0,
        )  # fmt: skip


class Asking:
    """A client that asks in a thread of its own, and an orchestrator that has heard it and died."""

    def __init__(self, address: str) -> None:
        self.got: list[object] = []
        self._client = Client(address)
        self._thread = threading.Thread(target=self._ask)
        first = Orchestrator(address, pid=1)
        self._thread.start()
        first.serve(generates=1, questions=1)
        first.hub.close()

    def _ask(self) -> None:
        self.got.extend(self._client.generate(REQUEST))

    def end(self) -> None:
        """Until the answer is there."""
        self._thread.join(PATIENCE_S)
        self._client.close()


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return ipc_address(str(tmp_path_factory.mktemp("z") / "s"))


def test_a_request_is_sent_again_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All questions of a long silence are answered at once; the request comes once for all of
    them, or two streams would be mixed up."""
    monkeypatch.setattr("protocol.client.client.SILENCE_S", 0.05)
    monkeypatch.setattr("protocol.client.request_session._MAX_UNANSWERED", sys.maxsize)
    silence = RequestSession.on_silence
    count, enough = [0], threading.Event()

    def counted(dialogue: RequestSession) -> StatusRequest:
        count[0] += 1
        if count[0] == QUESTIONS:
            enough.set()
        return silence(dialogue)

    monkeypatch.setattr(RequestSession, "on_silence", counted)
    asking = Asking(address)
    assert enough.wait(PATIENCE_S)
    second = Orchestrator(address, pid=2)
    second.serve(generates=1, questions=QUESTIONS + 3)
    assert second.generates == 1
    end = second.finish()
    asking.end()
    assert asking.got == [end]
    second.hub.close()


def test_a_new_orchestrator_is_asked_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose connection is made anew does not wait for a silence to ask."""
    monkeypatch.setattr("protocol.client.client.SILENCE_S", 1000.0)
    asking = Asking(address)
    second = Orchestrator(address, pid=2)
    second.serve(generates=1, questions=1)
    end = second.finish()
    asking.end()
    assert asking.got == [end]
    second.hub.close()


def test_a_lost_question_is_asked_again(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is there is asked again if the orchestrator that was asked does not answer."""
    monkeypatch.setattr("protocol.client.client.SILENCE_S", 0.05)
    client = Client(address)
    got: list[int] = []
    with Hub[ToOrchestrator](address, Decoder(ToOrchestrator)) as deaf:
        thread = threading.Thread(target=lambda: got.append(client.status(PATIENCE_S).pid))
        thread.start()
        assert deaf.ready(PATIENCE_S)
    second = Orchestrator(address, pid=2)
    second.serve(generates=0, questions=1)
    thread.join(PATIENCE_S)
    assert got == [2]
    client.close()
    second.hub.close()


def test_a_status_in_the_middle_of_an_answer_loses_none_of_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that arrive before the status are taken in their order afterwards."""
    monkeypatch.setattr("protocol.client.client.SILENCE_S", 1000.0)
    got: list[object] = []
    client = Client(address)

    def ask() -> None:
        for event in client.generate(REQUEST):
            got.append(event)
            if len(got) == 1:
                client.status(PATIENCE_S)

    thread = threading.Thread(target=ask)
    orchestrator = Orchestrator(address, pid=1)
    thread.start()
    orchestrator.serve(generates=1, questions=1)
    texts = [Text(request=1, tokens=[n], origins=["target"], pieces=["x"]) for n in (7, 8)]
    for text in texts:
        orchestrator.hub.send(orchestrator.client, text)
    orchestrator.serve(generates=1, questions=2)
    end = orchestrator.finish()
    thread.join(PATIENCE_S)
    client.close()
    orchestrator.hub.close()
    assert [*texts, end] == got
