"""Request intake: limits, prompt and admission, before a request waits for its turn."""

import logging
from collections.abc import Callable
from functools import partial

from orchestrator.requests.admission import Admission, share_of
from orchestrator.requests.crash_journal import CrashJournal, fingerprint
from orchestrator.requests.queue import RequestQueue
from orchestrator.telemetry.recorder import Recorder
from orchestrator.text.prompt_encoder import PromptEncoder
from protocol.errors import Busy, ServiceLost, SsdError, UsageError
from protocol.messages import (
    Finished,
    Generate,
    Rejected,
    RejectedKind,
    Tokens,
    ToOrchestrator,
)
from protocol.process.logs import about
from protocol.transport.channel import Hub

_log = logging.getLogger(__name__)

_BUSY = "too many requests are waiting; try again later"
_GUILTY = "this request is not tried again: a process died each time it worked on it (max_deaths)"


class Intake:
    """Turns `Generate` messages into requests in the queue, or rejects them.

    Args:
        on_admitted: called after a request has entered the queue.
    """

    def __init__(
        self,
        clients: Hub[ToOrchestrator],
        *,
        queue: RequestQueue,
        admission: Admission,
        prompts: PromptEncoder,
        journal: CrashJournal,
        on_admitted: Callable[[], None],
    ) -> None:
        self._clients = clients
        self._queue = queue
        self._admission = admission
        self._prompts = prompts
        self._journal = journal
        self._on_admitted = on_admitted
        self.closed_because = ""
        """Reason why no further request can be answered, if so."""
        self.context_length = 0
        """Context length of the current target; 0 if it is unlimited, or there is no target."""
        self.memory_limit = ""
        """The memory limit behind the context length, if there is one."""

    def is_known(self, peer: bytes, number: int) -> bool:
        """Return True if this client's request is in progress or waits."""
        return (peer, number) in self._prompts or self._queue.find(peer, number) is not None

    def on_generate(self, peer: bytes, message: Generate, now: float) -> None:
        """Accept a client's request: queue it, reject it, or have its prompt tokenised."""
        if self.is_known(peer, message.request):
            return  # a repeated request
        if self.closed_because:
            self._reject(peer, message, self.closed_because, "unavailable")
        elif self._queue.is_full(self._arriving(), share_of(peer, message)):
            self._reject(peer, message, _BUSY, "busy")
        else:
            self._guard(peer, message, partial(self._prepare, peer, message, now))

    def _arriving(self) -> list[tuple[str, int]]:
        return [share_of(peer, message) for (peer, _), message in self._prompts]

    def collect(self, now: float) -> None:
        """Continue with the requests whose prompts have been tokenised."""
        for (peer, _), message, result in self._prompts.collect():
            if isinstance(result, SsdError):
                self._reject(peer, message, str(result), _kind_of(result))
            else:
                self._guard(peer, message, partial(self._admit, peer, message, result, now))

    def cancel(self, peer: bytes, number: int, now: float) -> bool:
        """Forget a request whose prompt is not ready; return False if there is no such request."""
        if not self._prompts.cancel((peer, number)):
            return False
        statistics = Recorder(now).summarise()
        end = Finished(request=number, reason="cancelled", prompt_tokens=0, statistics=statistics)
        self._clients.send(peer, end)
        return True

    def ban(self, digest: bytes) -> None:
        """Refuse further copies of a request that killed a service."""
        self._journal.ban(digest)

    def _guard(self, peer: bytes, message: Generate, work: Callable[[bytes], None]) -> None:
        """Run this work; any error in it rejects this request alone."""
        try:
            digest = fingerprint(message)
            if self._journal.is_guilty(digest):
                self._reject(peer, message, _GUILTY, "invalid")
                return
            before = self._journal.enter(digest, 0)
            try:
                work(digest)
            finally:
                self._journal.leave(before)
        except UsageError as error:
            self._reject(peer, message, str(error), "invalid")
        # A tokenizer or a template may raise anything.
        except Exception as error:  # noqa: BLE001
            _log.exception("a request cannot be admitted", extra=about(request=message.request))
            reason = f"this request could not be read: {type(error).__name__}: {error}"
            self._reject(peer, message, reason, "invalid")

    def _prepare(self, peer: bytes, message: Generate, now: float, digest: bytes) -> None:
        self._admission.check(message)
        prompt = self._prompts.encode((peer, message.request), message)
        if prompt is not None:
            self._admit(peer, message, prompt, now, digest)

    def _admit(
        self, peer: bytes, message: Generate, prompt: Tokens, now: float, digest: bytes
    ) -> None:
        request = self._admission.admit(
            peer,
            message,
            prompt,
            context_length=self.context_length,
            memory_limit=self.memory_limit,
            now=now,
        )
        request.digest = digest
        if message.count_only:
            statistics = request.sequence.recorder.summarise()
            count = len(prompt)
            self._clients.send(
                peer,
                Finished(
                    request=message.request,
                    reason="length",
                    prompt_tokens=count,
                    prompt=prompt,
                    statistics=statistics,
                ),
            )
            return
        self._queue.add(request)
        self._on_admitted()

    def _reject(self, peer: bytes, message: Generate, reason: str, kind: RejectedKind) -> None:
        self._clients.send(peer, Rejected(reason, kind, message.request))


def _kind_of(error: SsdError) -> RejectedKind:
    match error:
        case Busy():
            return "busy"
        case ServiceLost():
            return "unavailable"
        case _:
            return "invalid"
