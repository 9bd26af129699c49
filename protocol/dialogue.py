"""What an orchestrator's messages mean to the client of one request. No socket, no clock."""

from protocol.errors import Busy, RuntimeFailure, ServiceLost, SsdError, UsageError
from protocol.messages import (
    Finished,
    FromOrchestrator,
    Refusal,
    RefusalKind,
    Status,
    StatusRequest,
    Text,
)

SILENCE_S = 5.0
"""After this long without a word, the client asks whether the orchestrator is still there."""

_ERRORS: dict[RefusalKind, type[SsdError]] = {
    "invalid": UsageError,
    "busy": Busy,
    "unavailable": ServiceLost,
}


class Dialogue:
    """One request, and the orchestrator process (`pid`) that took it."""

    def __init__(self, request: int, pid: int) -> None:
        self._request = request
        self._pid = pid
        self._asked = False

    def take(self, message: FromOrchestrator) -> Text | Finished | None:
        """The message if it belongs to the answer, None if it means nothing here.

        Raises:
            UsageError, Busy, ServiceLost: the request was refused.
            RuntimeFailure: it failed, or was lost with its orchestrator.
        """
        self._asked = False
        match message:
            case Status(pid=now) if now != self._pid:
                raise RuntimeFailure("the orchestrator was restarted; the request is lost")
            case Refusal(reason=reason, kind=kind, request=number) if number in (0, self._request):
                raise _ERRORS[kind](reason)
            case Finished(request=number, reason="error", error=why) if number == self._request:
                raise RuntimeFailure(why)
            case Text(request=number) | Finished(request=number) if number == self._request:
                return message
            case _:
                return None  # of a request that was cancelled, or a sign of life

    def silence(self) -> StatusRequest:
        """What to ask after `SILENCE_S` without a message; the second time RuntimeFailure."""
        if self._asked:
            raise RuntimeFailure("the orchestrator does not answer any more")
        self._asked = True
        return StatusRequest()
