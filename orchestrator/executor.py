"""Executes the actions of requests: the edge of one request.

An error within a request (its text, its template, its statistics, a message that cannot be built)
ends that request and is logged with its numbers; all others continue.
"""

import logging
import time
from collections.abc import Callable
from typing import ParamSpec

from orchestrator.registry import Registry
from orchestrator.requests.crash_journal import CrashJournal
from orchestrator.requests.request import Request
from orchestrator.requests.timeouts import Timeouts
from orchestrator.sequence.actions import (
    Action,
    Emit,
    Finish,
    ToDrafter,
    ToVerifier,
)
from protocol.messages import (
    CloseSequence,
    FinishReason,
    FromService,
    Message,
    Prefilled,
    PrefillProgress,
    Rejected,
    Role,
    ToOrchestrator,
    VerificationOutcome,
    Verify,
)
from protocol.transport.channel import Hub

_log = logging.getLogger(__name__)

P = ParamSpec("P")


class Executor:
    """Executes actions through the two hubs.

    Args:
        on_end: called once for each request that has ended.
    """

    def __init__(
        self,
        services: Hub[FromService],
        clients: Hub[ToOrchestrator],
        *,
        registry: Registry,
        timeouts: Timeouts,
        journal: CrashJournal,
        on_end: Callable[[Request], None],
    ) -> None:
        self._services = services
        self._clients = clients
        self._registry = registry
        self._timeouts = timeouts
        self._journal = journal
        self._on_end = on_end
        self._behind: list[tuple[Request, float]] = []
        """Requests whose verification has ended but whose bookkeeping is pending, with the time."""

    def run(
        self,
        request: Request,
        event: Callable[P, list[Action]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Apply an event to a request and execute the resulting actions."""
        self.catch_up()
        self._run(request, event, *args, **kwargs)

    def _run(
        self,
        request: Request,
        event: Callable[P, list[Action]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        before = self._journal.enter(request.digest, len(request.sequence.tokens))
        try:
            for action in event(*args, **kwargs):
                self._do(request, action)
        # An error that belongs to one request ends that request alone.
        except Exception as error:  # noqa: BLE001
            self._fail(request, error)
        finally:
            self._journal.leave(before)

    def commit(self, request: Request, outcome: VerificationOutcome, now: float) -> None:
        """Send the next verification first; defer bookkeeping and text to `catch_up`.

        The outcomes of a shared pass arrive together, and the target waits for every follow-up.
        """
        if any(other is request for other, _ in self._behind):
            self.catch_up()
        self._run(request, self._decide, request, outcome, now)
        self._behind.append((request, now))

    def catch_up(self) -> None:
        """Do the work that was deferred until the next verifications had been sent."""
        while self._behind:
            request, now = self._behind.pop(0)
            if not request.is_over:
                self._run(request, request.sequence.record, now)

    def _decide(self, request: Request, outcome: VerificationOutcome, now: float) -> list[Action]:
        sequence = request.sequence
        sequence.recorder.verifying_since = None
        actions = sequence.decide(outcome, now)
        self._timeouts.start(request, now)  # even if nothing is sent: the next outcome is due
        for action in filter(_is_verify, actions):
            self._do(request, action)
            if sequence.current.origin == "hit":
                sequence.recorder.add_dispatch(now, time.monotonic())
        return [action for action in actions if not _is_verify(action)]

    def report_progress(
        self, request: Request, role: Role, message: PrefillProgress | Prefilled
    ) -> None:
        """Report the target's prefill progress to a client that wants it."""
        if role == "verifier" and (progress := request.on_prefill_progress(message)) is not None:
            self._clients.send(request.peer, progress)

    # ------------------------------------------------------------ actions

    def _do(self, request: Request, action: Action) -> None:
        match action:
            case ToVerifier(message) | ToDrafter(message):
                self._send("verifier" if isinstance(action, ToVerifier) else "drafter", message)
                self._timeouts.start(request, time.monotonic())
            case Emit(tokens):
                if not request.is_stopped and tokens:
                    self._emit(request, action)
            case Finish(reason, error):
                self._finish(request, reason, error)

    def _send(self, role: Role, message: Message | bytes) -> None:
        if (peer := self._registry.peers.get(role)) is not None:
            if not isinstance(message, bytes):
                self._registry.on_sent(peer.address, message)
            self._services.send(peer.address, message)

    def _emit(self, request: Request, emit: Emit) -> None:
        text = request.add_tokens(emit.tokens, emit.origins, emit.logprobs)
        if not self._clients.send(request.peer, text):
            request.is_unreachable = True
            self.run(request, request.sequence.finish, "cancelled")
        elif request.is_stopped:
            self.run(request, request.sequence.finish, "stop")

    def _finish(self, request: Request, reason: FinishReason, error: str) -> None:
        if self._registry.lookup_only and not request.has_had_drafter:
            request.sequence.recorder.fallbacks.pop("no_drafter", None)  # none is configured
        for message in request.last_messages(reason, error):
            if not self._clients.send(request.peer, message):
                break  # continuing would hide that something is missing
        self._end(request)

    def _end(self, request: Request) -> None:
        if not request.is_over:
            request.is_over = True
            self._on_end(request)

    # ------------------------------------------------------------ failures

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request in which an error occurred."""
        _log.error("the request failed: %s", error, exc_info=error, extra=request.ids)
        reason = f"this request could not be served: {type(error).__name__}: {error}"
        try:
            for action in request.sequence.finish("error", reason):
                self._do(request, action)
        # Even the end of the request may fail to be computed.
        except Exception as again:  # noqa: BLE001
            _log.exception("the request's end failed: %s", again, extra=request.ids)
        if not request.is_over:
            for role in self._registry.peers:
                self._send(role, CloseSequence(sequence=request.sequence.number))
            self._clients.send(request.peer, Rejected(reason, "unavailable", request.number))
            self._end(request)


def _is_verify(action: Action) -> bool:
    return isinstance(action, ToVerifier) and isinstance(action.message, Verify)
