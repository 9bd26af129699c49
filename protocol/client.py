"""The client's end: ask an orchestrator for text, its status, or to stop."""

import itertools
from collections.abc import Generator

from protocol.channel import Channel, Deadline
from protocol.codec import Decoder
from protocol.errors import (
    Busy,
    DeadlineExceeded,
    RuntimeFailure,
    ServiceLost,
    SsdError,
    UsageError,
)
from protocol.messages import (
    Cancel,
    Finished,
    FromOrchestrator,
    Generate,
    Refusal,
    RefusalKind,
    ServiceDown,
    Status,
    StatusRequest,
    Text,
)

_ERRORS: dict[RefusalKind, type[SsdError]] = {
    "invalid": UsageError,
    "busy": Busy,
    "unavailable": ServiceLost,
}

_REPLY_S = 10.0
_SILENCE_S = 5.0
"""After this long without a word, the client asks whether the orchestrator is still there."""


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
        pid = self.status().pid
        self._channel.send(request)
        done = False
        try:
            while not done:
                message = self._next(request.request, pid)
                done = isinstance(message, Finished)
                yield message
        finally:
            if not done:
                self._channel.send(Cancel(request=request.request))

    def _next(self, request: int, pid: int) -> Text | Finished:
        """The next message of this request, from the orchestrator process that took it."""
        asked = False
        while True:
            try:
                message = self._channel.receive(_SILENCE_S, "answer")
            except DeadlineExceeded as error:
                if asked:
                    raise RuntimeFailure("the orchestrator does not answer any more") from error
                self._channel.send(StatusRequest())
                asked = True
                continue
            match message:
                case Status(pid=now):
                    asked = False
                    if now != pid:
                        raise RuntimeFailure("the orchestrator was restarted; the request is lost")
                case Refusal(reason=reason, kind=kind, request=number) if number in (0, request):
                    raise _ERRORS[kind](reason)
                case Finished(request=number, reason="error", error=why) if number == request:
                    raise RuntimeFailure(why)
                case Text(request=number) | Finished(request=number) if number == request:
                    return message
                case Text() | Finished() | Refusal():
                    pass  # of a request that was cancelled

    def service_down(self, message: ServiceDown) -> None:
        """The supervisor's note that a process ended."""
        self._channel.send(message)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
