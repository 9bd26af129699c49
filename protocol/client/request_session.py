"""The client-side state of one request: interprets the orchestrator's messages. No I/O.

An orchestrator may be restarted while a request runs. Under the coupled rule an answer is a
function of its request, so the client repeats the request and skips what it has received before.
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
"""Silence after which the client asks if its request is still served."""

_MAX_UNANSWERED = 30
"""Consecutive unanswered questions after which the orchestrator counts as dead."""

_ERRORS: dict[RejectedKind, type[SsdError]] = {
    "invalid": UsageError,
    "busy": Busy,
    "unavailable": ServiceLost,
}


def to_error(kind: RejectedKind, reason: str) -> SsdError:
    """Return the exception for a rejection of this kind."""
    return _ERRORS[kind](reason)


class RequestSession:
    """One request.

    Answers to status questions from before the request was last sent are ignored: a slow-starting
    orchestrator finds many of those in its queue, and answers all of them.
    """

    def __init__(self, request: Generate) -> None:
        self._request = request
        self._questions = 0
        self._questions_before = 0
        """Number of questions sent before the request was last sent."""
        self._unanswered = 0
        self._received = 0
        self._repeated = 0
        self._rest = False

    def handle(self, message: FromOrchestrator) -> Text | Finished | Generate | None:
        """Return a part of the answer, the request to send again, or None.

        Raises:
            UsageError, Busy, ServiceLost: the request was rejected.
            RuntimeFailure: the request failed, or was lost and cannot be repeated.
        """
        self._unanswered = 0
        number = self._request.request
        match message:
            case Status(request=request, question=question) if request == number:
                lost = question > self._questions_before and not message.serving
                return self._again() if lost else None
            case Rejected(reason=reason, kind=kind, request=request) if request in (0, number):
                raise to_error(kind, reason)
            case Finished(request=request, reason="error", error=why) if request == number:
                raise RuntimeFailure(why)
            case Finished(request=request) if request == number:
                return message
            case Text(request=request) if request == number:
                return self._news(message)
            case _:
                return None  # of a cancelled request, or a sign of life

    def _again(self) -> Generate:
        """Return the request to repeat: the orchestrator was restarted, or has dropped it."""
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
        """Return the new part of a message, or None if all of it was received before."""
        if not text.tokens:  # text released at the end of the answer
            again, self._rest = self._rest, True
            return None if again else text
        received = max(0, min(len(text.tokens), self._received - self._repeated))
        self._repeated += len(text.tokens)
        self._received = max(self._received, self._repeated)
        if received == 0:
            return text
        rest = Text(
            request=text.request,
            tokens=text.tokens[received:],
            origins=text.origins[received:],
            pieces=text.pieces[received:],
            logprobs=text.logprobs[received:],
        )
        return rest if rest.pieces else None

    def on_silence(self) -> StatusRequest:
        """Return the question to send after `SILENCE_S` without a message.

        Raises:
            RuntimeFailure: too many questions have gone unanswered.
        """
        if self._unanswered >= _MAX_UNANSWERED:
            raise RuntimeFailure("the orchestrator no longer answers")
        self._unanswered += 1
        self._questions += 1
        return StatusRequest(request=self._request.request, question=self._questions)
