"""The orchestrator's event loop: sockets and clock around the pure state of its sequences.

One turn of the loop: wait; read the services' messages and send the next `Verify` before anything
else; then handle clients, prompts that are ready, and deadlines. Each turn reads a limited number
of messages from either side, so that a flood from one does not block the other. Text is decoded and
streamed while the target is busy.
"""

import logging
import time

from orchestrator.executor import Executor
from orchestrator.hang_detector import HangDetector
from orchestrator.learning.cost_model import CostModel
from orchestrator.message_budget import take_some
from orchestrator.registry import Peer, Registry, handshake_error
from orchestrator.requests.admission import Admission, AdmissionLimits
from orchestrator.requests.crash_journal import CrashJournal
from orchestrator.requests.intake import Intake
from orchestrator.requests.probation import Probation
from orchestrator.requests.queue import RequestQueue
from orchestrator.requests.request import Request
from orchestrator.requests.rotation import Rotation
from orchestrator.requests.timeouts import Timeouts
from orchestrator.sequence.phase import Phase
from orchestrator.status import StatusReporter
from orchestrator.text.prompt_encoder import PromptEncoder
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.vocabulary import Vocabulary
from protocol.errors import ProtocolError
from protocol.messages import (
    Cancel,
    DraftTree,
    Failed,
    Features,
    FromService,
    Generate,
    Heartbeat,
    Hello,
    Identify,
    Prefilled,
    PrefillProgress,
    Prepared,
    ReadTarget,
    Rejected,
    Role,
    ServiceDown,
    StatusRequest,
    Stop,
    ToOrchestrator,
    VerificationOutcome,
    Welcome,
)
from protocol.process.heap import freeze_heap
from protocol.settings import OrchestratorSettings
from protocol.transport.channel import Hub, Poller

_log = logging.getLogger(__name__)

_ROLES: tuple[Role, ...] = ("verifier", "drafter")
_TICK_S = 0.25


class Orchestrator:
    """Owns the state of every request; see the module's docstring for its loop."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        *,
        services: Hub[FromService],
        clients: Hub[ToOrchestrator],
        tokenizer: TargetTokenizer,
        prompts: PromptEncoder,
        journal: CrashJournal,
        vocabulary: Vocabulary,
        pid: int,
    ) -> None:
        self._services, self._clients = services, clients
        self._prompts, self._vocabulary = prompts, vocabulary
        self._max_deaths, self._estimates = settings.max_deaths, CostModel()
        hangs = HangDetector(settings.hang_timeout_s, settings.first_timeout_s)
        self._registry = Registry(hangs, lookup_only=settings.lookup_only)
        services.limit_of = self._registry.limit_of
        self._requests = RequestQueue(settings.concurrency, settings.max_waiting)
        self._probation = {role: Probation(settings.max_deaths) for role in _ROLES}
        self._timeouts = Timeouts(
            self._estimates, settings.draft_timeout_s, settings.verify_timeout_s
        )
        self._executor = self._create_executor(journal)
        self._rotation = Rotation(self._requests, self._executor)
        admission = Admission(
            tokenizer, vocabulary.size, self._estimates, limits=AdmissionLimits.of(settings)
        )
        self._intake = self._create_intake(admission, journal)
        self._status = StatusReporter(
            pid,
            settings.model,
            registry=self._registry,
            requests=self._requests,
            estimates=self._estimates,
        )
        self._asked = ReadTarget()  # the last one

    def _create_executor(self, journal: CrashJournal) -> Executor:
        return Executor(
            self._services,
            self._clients,
            registry=self._registry,
            timeouts=self._timeouts,
            journal=journal,
            on_end=self._on_request_end,
        )

    def _create_intake(self, admission: Admission, journal: CrashJournal) -> Intake:
        return Intake(
            self._clients,
            queue=self._requests,
            admission=admission,
            prompts=self._prompts,
            journal=journal,
            on_admitted=self._start_waiting,
        )

    def run(self) -> None:
        """Serve until the process ends."""
        poller = Poller([self._services, self._clients])
        poller.add_reader(self._prompts.descriptor)
        freeze_heap()
        while True:
            self._status.steps.end()
            poller.wait(self._timeouts.seconds_left(self._requests.running.values(), _TICK_S))
            self._status.steps.begin()
            for received in take_some(self._services.receive):
                self._on_service_message(*received)
            self._executor.catch_up()
            for request in take_some(self._clients.receive):
                self._on_client_message(*request)
            self._intake.collect(time.monotonic())
            self._check_deadlines()

    # ------------------------------------------------------------ services

    def _on_service_message(self, address: bytes, message: FromService | ProtocolError) -> None:
        peer = self._registry.find(address)
        self._registry.on_message(address, message)
        is_verifier = peer is not None and peer.hello.role == "verifier"
        if isinstance(message, VerificationOutcome) and is_verifier:
            self._on_outcome(message)
            return
        self._executor.catch_up()
        if isinstance(message, Hello):
            self._on_hello(Peer(address, message))
        elif peer is None:
            self._services.send(address, Identify())
        elif isinstance(message, ProtocolError):
            self._mark_for_kill(peer, f"the {peer.hello.role} sent an invalid message: {message}")
        elif is_verifier or self._registry.spend(peer, time.monotonic()):
            self._on_peer_message(peer, message)
        else:
            self._mark_for_kill(peer, "the drafter sends more than it was asked for")

    def _on_peer_message(self, peer: Peer, message: FromService) -> None:
        match message:
            case Heartbeat():
                self._on_heartbeat(peer, message)
            case DraftTree():
                self._on_tree(message)
            case Features():
                self._on_features(peer, message)
            case Failed():
                self._on_failed(peer.hello.role, message)
            case PrefillProgress():
                self._on_prefill_progress(peer, message)
            case Prefilled():
                self._on_prefilled(peer.hello.role, message)
            case Prepared():
                self._estimates.expect_passes(message.pass_times, peer.hello.role)
            case Hello() | VerificationOutcome():
                pass  # one was handled before; the other is not for a drafter to send

    def _mark_for_kill(self, peer: Peer, reason: str) -> None:
        """Have the supervisor end a peer that misbehaves; drop a drafter at once."""
        if peer.hello.role == "drafter":
            self._on_service_down(
                ServiceDown(role="drafter", pid=peer.hello.pid, reason=reason, final=False)
            )
        self._registry.mark_for_kill(peer, reason)

    def _on_heartbeat(self, peer: Peer, message: Heartbeat) -> None:
        self._services.send(peer.address, message)
        request = self._requests.running.get(message.sequence)
        if request is not None and peer.hello.role == "verifier":
            self._timeouts.start(request, time.monotonic())  # a long prefill may continue

    def _on_outcome(self, message: VerificationOutcome) -> None:
        if (request := self._requests.running.get(message.sequence)) is None:
            return
        self._executor.commit(request, message, time.monotonic())
        if not request.is_over:
            self._count_progress(request)
            self._rotation.on_tokens(request, time.monotonic())

    def _on_tree(self, message: DraftTree) -> None:
        request = self._requests.running.get(message.sequence)
        if request is not None:
            self._executor.run(request, request.on_tree, message, time.monotonic())
        self._timeouts.on_draft(request, time.monotonic())

    def _on_prefilled(self, role: Role, message: Prefilled) -> None:
        if request := self._requests.running.get(message.sequence):
            self._executor.run(request, request.on_prefilled, message, role, time.monotonic())
            self._executor.report_progress(request, role, message)

    def _on_prefill_progress(self, peer: Peer, message: PrefillProgress) -> None:
        request = self._requests.running.get(message.sequence)
        if request is not None and peer.hello.role == "verifier":
            self._timeouts.start(request, time.monotonic())
            self._executor.report_progress(request, peer.hello.role, message)

    def _on_features(self, peer: Peer, message: Features) -> None:
        """Forward the target's features to the drafter unchanged."""
        drafter = self._registry.peers.get("drafter")
        if peer.hello.role == "drafter":
            self._mark_for_kill(peer, "the drafter sent an invalid message: features")
        elif drafter is not None and message.request == self._asked.number:
            self._services.send(drafter.address, message)
            if request := self._requests.running.get(message.sequence):
                request.sequence.recorder.count_states(len(message.data))

    def _request_features(self) -> None:
        """Request the target features that the current drafter reads, if any."""
        verifier, drafter = (self._registry.peers.get(role) for role in ("verifier", "drafter"))
        features = drafter.hello.features if drafter is not None else None
        self._registry.unreadable = ""
        if verifier is not None and (features is not None or self._asked.features is not None):
            self._asked = ReadTarget(features=features, number=self._asked.number + 1)
            self._services.send(verifier.address, self._asked)

    def _on_failed(self, role: Role, message: Failed) -> None:
        if role == "verifier" and message.sequence == 0:
            self._registry.unreadable = message.error
        request = self._requests.running.get(message.sequence)
        _log.warning("the %s failed: %s", role, message.error, extra=request.ids if request else {})
        if request is not None and role == "verifier":
            reason = f"the verifier failed: {message.error}"
            self._executor.run(request, request.sequence.finish, "error", reason)
        elif request is not None:
            self._executor.run(request, request.sequence.on_drafter_lost, "drafter_failed")

    def _on_hello(self, peer: Peer) -> None:
        role = peer.hello.role
        if peer.hello.pid in self._registry.marked_for_kill:
            return  # it is about to be ended
        if (reason := handshake_error(peer.hello, self._vocabulary)) is not None:
            self._registry.rejected[role] = reason
            self._services.send(peer.address, Rejected(reason))
            return
        if self._registry.is_outdated(peer):  # a swapped-out drafter that reconnects
            self._services.send(peer.address, Stop())
            return
        self._services.accept(peer.address)
        old = self._registry.add(peer)
        self._estimates.on_hello(peer.hello)
        self._services.send(peer.address, Welcome())
        if old is not None and old.address != peer.address:
            self._services.send(old.address, Stop())
        if role == "verifier":
            self._intake.closed_because = ""
        self._request_features()
        self._set_context()
        for request in list(self._requests.running.values()):
            self._executor.run(request, request.on_service_replaced, peer.hello)
        self._open_requests(role)

    def _on_service_down(self, message: ServiceDown) -> None:
        role, peer = message.role, self._registry.peers.get(message.role)
        named = self._registry.working_on(peer) if peer is not None else 0
        current = self._registry.remove(role, message.pid, for_good=message.removed)
        self._set_context()
        if role == "verifier" and message.final:
            self._intake.closed_because = message.reason
            for request in list(self._requests):
                self._executor.run(request, request.sequence.finish, "error", message.reason)
        if current and not message.removed:
            self._blame(role, named)
        reason = "drafter_swapped" if message.removed else "drafter_died"
        for request in list(self._requests.running.values()) if current else ():
            self._executor.run(request, request.on_service_lost, role, reason)

    def _set_context(self) -> None:
        self._intake.context_length = self._registry.context_length
        self._intake.memory_limit = self._registry.memory_limit

    def _blame(self, role: Role, named: int) -> None:
        """Suspect the requests that a dead service worked for, and end the guilty ones."""
        in_flight = {
            request.sequence.number: len(request.sequence.tokens)
            for request in self._requests.running.values()
            if role in request.open_at
            and (role == "drafter" or request.sequence.phase is Phase.VERIFYING)
        }
        for number in self._probation[role].on_death(in_flight, named):
            request = self._requests.running[number]
            _log.error("the %s died of this request", role, extra=request.ids)
            if role == "drafter":
                request.has_drafter_ban = True  # the answer is the same without a drafter
                continue
            reason = f"the verifier died {self._max_deaths} times while it worked on this request, "
            reason += "which is not tried again (max_deaths)"
            self._intake.ban(request.digest)
            self._executor.run(request, request.sequence.finish, "error", reason)

    def _count_progress(self, request: Request) -> None:
        for role, probation in self._probation.items():
            number, length = request.sequence.number, len(request.sequence.tokens)
            if role in request.open_at and probation.on_progress(number, length):
                self._open_requests(role)

    def _open_requests(self, role: Role) -> None:
        """Open all requests at the service of this role that it may work for."""
        if (peer := self._registry.peers.get(role)) is None:
            return
        running = self._requests.running
        candidates = [
            number
            for number, request in running.items()
            if role not in request.open_at
            and not (role == "drafter" and (request.has_drafter_ban or request.is_plain))
        ]
        at_work = [number for number, request in running.items() if role in request.open_at]
        for number in self._probation[role].select(candidates, at_work):
            if (request := running.get(number)) is not None:
                request.open_at.add(role)
                self._executor.run(request, request.on_service_up, peer.hello)

    # ------------------------------------------------------------ clients

    def _on_client_message(self, peer: bytes, message: ToOrchestrator | ProtocolError) -> None:
        match message:
            case Generate():
                self._intake.on_generate(peer, message, time.monotonic())
            case Cancel():
                self._on_cancel(peer, message.request)
            case StatusRequest():
                status = self._status.report(
                    message,
                    serving=self._intake.is_known(peer, message.request),
                    dropped=self._services.dropped + self._clients.dropped,
                    now=time.monotonic(),
                )
                self._clients.send(peer, status)
            case ServiceDown():
                self._on_service_down(message)
            case ProtocolError():
                self._clients.send(peer, Rejected(str(message)))

    def _on_cancel(self, peer: bytes, number: int) -> None:
        if request := self._requests.find(peer, number):
            self._executor.run(request, request.sequence.finish, "cancelled")
        else:
            self._intake.cancel(peer, number, time.monotonic())

    def _start_waiting(self) -> None:
        self._rotation.advance(self._registry.kv_tokens, time.monotonic())
        self._count_streams()
        for role in list(self._registry.peers):
            self._open_requests(role)

    def _on_request_end(self, request: Request) -> None:
        self._requests.remove(request)
        self._count_streams()
        for probation in self._probation.values():
            probation.remove(request.sequence.number)
        self._start_waiting()

    def _count_streams(self) -> None:
        self._estimates.streams = max(1, self._requests.counts[0])
        self._registry.draws = any(request.draws for request in self._requests.running.values())

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        self._requests.update_window(now)
        for request in self._timeouts.find_late(self._requests.running.values()):
            self._executor.run(request, self._timeouts.give_up, request)
        for peer, reason in self._registry.find_hanging(now):
            self._mark_for_kill(peer, reason)
        if self._requests.has_waiting:
            self._start_waiting()
        self._services.keep_bound(now)
        self._clients.keep_bound(now)
