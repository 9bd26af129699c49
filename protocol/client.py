"""The client's end: ask an orchestrator for text, its status, or to stop."""

import itertools
from collections.abc import Generator

from protocol.channel import Channel, Deadline
from protocol.codec import Decoder
from protocol.dialogue import SILENCE_S, Dialogue
from protocol.messages import (
    Cancel,
    Finished,
    FromOrchestrator,
    Generate,
    ServiceDown,
    Status,
    StatusRequest,
    Text,
)

_REPLY_S = 10.0


class Client:
    """One connection to an orchestrator; used by one thread, for one request at a time."""

    def __init__(self, address: str) -> None:
        self._channel: Channel[FromOrchestrator] = Channel(address, Decoder(FromOrchestrator))
        self._numbers = itertools.count(1)

    def status(self, timeout_s: float = _REPLY_S) -> Status:
        """Who is there; raises DeadlineExceeded if nobody answers."""
        self._channel.send(StatusRequest())
        deadline = Deadline(timeout_s)
        while True:
            reply = self._channel.receive(deadline.remaining, "status of the orchestrator")
            if isinstance(reply, Status):
                return reply

    def ask_status(self) -> None:
        """Ask without waiting; `status_if_any` picks the answer up."""
        self._channel.send(StatusRequest())

    def status_if_any(self) -> Status | None:
        """The latest status that has arrived, without waiting."""
        latest: Status | None = None
        while self._channel.ready(0.0):
            reply = self._channel.receive(0.0, "status of the orchestrator")
            latest = reply if isinstance(reply, Status) else latest
        return latest

    def number(self) -> int:
        """A request number that this client has not used."""
        return next(self._numbers)

    def generate(self, request: Generate) -> Generator[Text | Finished]:
        """Stream an answer: Text messages, then one Finished. Closing the generator cancels.

        Raises:
            UsageError: the request is wrong.
            Busy: too many requests wait already.
            RuntimeFailure: the request failed, or the orchestrator is gone.
        """
        dialogue = Dialogue(request.request, self.status().pid)
        self._channel.send(request)
        done = False
        try:
            while not done:
                message = self._next(dialogue)
                done = isinstance(message, Finished)
                yield message
        finally:
            if not done:
                self._channel.send(Cancel(request=request.request))

    def _next(self, dialogue: Dialogue) -> Text | Finished:
        """The next message of this request."""
        while True:
            if not self._channel.ready(SILENCE_S):
                self._channel.send(dialogue.silence())
                continue
            message = dialogue.take(self._channel.receive(0.0, "answer"))
            if message is not None:
                return message

    def service_down(self, message: ServiceDown) -> None:
        """The supervisor's note that a process ended."""
        self._channel.send(message)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
