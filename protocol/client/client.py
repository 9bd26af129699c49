"""The synchronous client of an orchestrator: generate text, ask for its status, stop it."""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable

from protocol.client.request_session import SILENCE_S, RequestSession
from protocol.errors import DeadlineExceeded
from protocol.messages import (
    Cancel,
    Finished,
    FromOrchestrator,
    Generate,
    Progress,
    ServiceDown,
    Status,
    StatusRequest,
    Text,
)
from protocol.process.deadline import Deadline
from protocol.transport.channel import Channel
from protocol.transport.codec import Decoder

_REPLY_S = 10.0


class Client:
    """One connection to an orchestrator; used by one thread, for one request at a time."""

    def __init__(self, address: str) -> None:
        self._channel: Channel[FromOrchestrator] = Channel(address, Decoder(FromOrchestrator))
        self._numbers = itertools.count(1)
        self.on_progress: Callable[[Progress], None] = lambda _: None
        """Called during the prefill of a request that has `progress` set (`Generate`)."""
        self._asked = 0
        self._missed: deque[FromOrchestrator] = deque()
        """Parts of answers that arrived during a wait for a status."""
        """How often the status was asked for."""

    def status(self, timeout_s: float = _REPLY_S) -> Status:
        """Return the stack's status; raise DeadlineExceeded if the orchestrator does not answer.

        The question is repeated, since it may be lost with an orchestrator that dies.
        """
        deadline, first = Deadline(timeout_s), self._asked + 1
        while True:
            self._asked += 1
            self._channel.send(StatusRequest(question=self._asked))
            turn = Deadline(min(SILENCE_S, deadline.remaining))
            while self._channel.ready(turn.remaining):
                reply = self._channel.receive(0.0, "status of the orchestrator")
                # Skip late answers to earlier questions.
                if isinstance(reply, Status) and not reply.request and reply.question >= first:
                    return reply
                self._missed.append(reply)
            if deadline.passed:
                raise DeadlineExceeded(f"no status of the orchestrator within {timeout_s:g} s")

    def request_status(self) -> None:
        """Ask without waiting; `poll_status` returns the answer."""
        self._channel.send(StatusRequest())

    def poll_status(self) -> Status | None:
        """Return the latest status that has arrived, without waiting."""
        latest: Status | None = None
        while self._channel.ready(0.0):
            reply = self._channel.receive(0.0, "status of the orchestrator")
            if isinstance(reply, Status):
                latest = reply
            else:
                self._missed.append(reply)
        return latest

    def number(self) -> int:
        """Return a request number that this client has not used."""
        return next(self._numbers)

    def generate(self, request: Generate) -> Generator[Text | Finished]:
        """Stream an answer: Text messages, then one Finished. Closing the generator cancels.

        Raises:
            UsageError: the request is invalid.
            Busy: too many requests wait already.
            RuntimeFailure: the request failed, or the orchestrator is gone.
        """
        with contextlib.closing(self.generate_many([request], at_once=1)) as events:
            for _, event in events:
                yield event

    def generate_many(
        self, requests: Iterable[Generate], at_once: int
    ) -> Generator[tuple[int, Text | Finished]]:
        """Generate several answers, `at_once` at a time: yield (number, message) as they arrive.

        The first error ends all of them; errors as for `generate`.
        """
        self.status()  # raises if there is no orchestrator
        self._channel.await_news(0.0)  # only later connections count as new
        self._missed.clear()
        waiting = deque(requests)
        sessions: dict[int, RequestSession] = {}
        try:
            while waiting or sessions:
                while waiting and len(sessions) < at_once:
                    request = waiting.popleft()
                    sessions[request.request] = RequestSession(request)
                    self._channel.send(request)
                for number, event in self._next(sessions):
                    if isinstance(event, Finished):
                        del sessions[number]
                    yield number, event
        finally:
            for number in sessions:
                self._channel.send(Cancel(request=number))

    def _next(self, sessions: dict[int, RequestSession]) -> list[tuple[int, Text | Finished]]:
        """Return the events of the next message; empty after a silence.

        On a new connection, also check that the requests are still served.
        """
        if not self._missed and not self._channel.await_news(SILENCE_S):
            for session in sessions.values():
                self._channel.send(session.on_silence())
            return []
        message = self._missed.popleft() if self._missed else self._channel.receive(0.0, "answer")
        if isinstance(message, Progress) and message.request in sessions:
            self.on_progress(message)
        events = [(number, session.handle(message)) for number, session in sessions.items()]
        for _, event in events:
            if isinstance(event, Generate):
                self._channel.send(event)
        return [(n, event) for n, event in events if isinstance(event, Text | Finished)]

    def report_service_down(self, message: ServiceDown) -> None:
        """Report to the orchestrator that a process has ended; sent by the supervisor."""
        self._channel.send(message)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
