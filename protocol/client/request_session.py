"""Meaning of an orchestrator's messages to the client of one request. No socket, no clock.

An orchestrator may be restarted while a request runs. Under the coupled rule an answer is
a function of its request, so the client asks again and skips what it has had already.
"""

from protocol.decoding.sampling_params import is_greedy, uses_rejection
from protocol.errors import Busy, RuntimeFailure, ServiceLost, SsdError, UsageError
from protocol.messages import (
    Finished,
    FromOrchestrator,
    Generate,
    Rejected,
    RejectedKind,
    Status,
    StatusRequest,
    Text,
)

SILENCE_S = 1.0
"""After this long without a word, the client asks whether its request is still there."""

_MAX_UNANSWERED = 30
"""Questions in a row without an answer, after which the orchestrator is taken for dead."""

_ERRORS: dict[RejectedKind, type[SsdError]] = {
    "invalid": UsageError,
    "busy": Busy,
    "unavailable": ServiceLost,
}


def to_error(kind: RejectedKind, reason: str) -> SsdError:
    """The error that a refusal of this kind is."""
    return _ERRORS[kind](reason)


class RequestSession:
    """One request.

    A question that was sent before the request was sent (again) says nothing about it: an
    orchestrator that takes long to start finds many of them, and answers them all.
    """

    def __init__(self, request: Generate) -> None:
        self._request = request
        self._questions = 0
        self._questions_before = 0
        """Those that were sent before the request was sent last."""
        self._unanswered = 0
        self._received = 0
        self._repeated = 0
        self._rest = False

    def take(self, message: FromOrchestrator) -> Text | Finished | Generate | None:
        """Return a part of the answer, the request to be sent again, or nothing.

        Raises:
            UsageError, Busy, ServiceLost: the request was refused.
            RuntimeFailure: it failed, or was lost and cannot be repeated.
        """
        self._unanswered = 0
        number = self._request.request
        match message:
            case Status(request=asked, question=question) if asked == number:
                lost = question > self._questions_before and not message.serving
                return self._again() if lost else None
            case Rejected(reason=reason, kind=kind, request=asked) if asked in (0, number):
                raise to_error(kind, reason)
            case Finished(request=asked, reason="error", error=why) if asked == number:
                raise RuntimeFailure(why)
            case Finished(request=asked) if asked == number:
                return message
            case Text(request=asked) if asked == number:
                return self._news(message)
            case _:
                return None  # of a request that was cancelled, or a sign of life

    def _again(self) -> Generate:
        """The orchestrator was restarted, or has dropped the request."""
        sampling = self._request.sampling
        if self._received and uses_rejection(sampling) and not is_greedy(sampling):
            raise RuntimeFailure(
                "the orchestrator was restarted, and under the rejection rule an answer cannot "
                "be continued; ask again"
            )
        self._questions_before = self._questions
        self._repeated = 0
        return self._request

    def _news(self, text: Text) -> Text | None:
        """The part of a message that was not received before; None if it has none."""
        if not text.tokens:  # what the end of an answer sets free
            again, self._rest = self._rest, True
            return None if again else text
        known = max(0, min(len(text.tokens), self._received - self._repeated))
        self._repeated += len(text.tokens)
        self._received = max(self._received, self._repeated)
        if known == 0:
            return text
        rest = Text(
            request=text.request,
            tokens=text.tokens[known:],
            origins=text.origins[known:],
            pieces=text.pieces[known:],
            logprobs=text.logprobs[known:],
        )
        return rest if rest.pieces else None

    def on_silence(self) -> StatusRequest:
        """Return the question to ask after `SILENCE_S` without a message.

        Raises:
            RuntimeFailure: it was asked often enough.
        """
        if self._unanswered >= _MAX_UNANSWERED:
            raise RuntimeFailure("the orchestrator no longer answers")
        self._unanswered += 1
        self._questions += 1
        return StatusRequest(request=self._request.request, question=self._questions)
