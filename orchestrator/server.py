"""The orchestrator's edge: sockets and clock around the pure state of its sequences.

The loop: wait; take what the services sent, and send the next `Verify` before anything
else; then clients, then deadlines. Text is decoded and streamed while the target is busy.
"""

import logging
import time
from collections.abc import Iterable

from orchestrator.hang_detector import HangDetector
from orchestrator.learning.estimate_store import EstimateStore
from orchestrator.registry import Peer, Registry, handshake_error
from orchestrator.requests.admission import Admission
from orchestrator.requests.queue import RequestQueue
from orchestrator.requests.request import Request
from orchestrator.requests.timeouts import Timeouts, seconds_left
from orchestrator.sequence.actions import (
    Action,
    Emit,
    Finish,
    PrecomputeVerify,
    ToDrafter,
    ToVerifier,
)
from orchestrator.status import StatusReporter
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.vocabulary import Vocabulary
from protocol.errors import ProtocolError, UsageError
from protocol.messages import (
    Cancel,
    DraftTree,
    Failed,
    Features,
    FinishReason,
    FromService,
    Generate,
    Heartbeat,
    Hello,
    Identify,
    Message,
    Prefilled,
    ReadTarget,
    Rejected,
    RejectedKind,
    Role,
    ServiceDown,
    StatusRequest,
    Stop,
    ToOrchestrator,
    VerificationOutcome,
    Verify,
    Welcome,
)
from protocol.settings import OrchestratorSettings
from protocol.transport.channel import Hub, Poller
from protocol.transport.codec import encode

_log = logging.getLogger(__name__)

_TICK_S = 0.25
_BUSY = "too many requests are waiting; try again later"


class Orchestrator:
    """Knows the whole state of every request; see the module's docstring for its loop."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        *,
        services: Hub[FromService],
        clients: Hub[ToOrchestrator],
        tokenizer: TargetTokenizer,
        vocabulary: Vocabulary,
        pid: int,
    ) -> None:
        self._services = services
        self._clients = clients
        self._vocabulary = vocabulary
        self.estimates = EstimateStore(settings.learned_dir, settings.machine)
        cost_model = self.estimates.cost_model
        self._registry = Registry(HangDetector(settings.hang_timeout_s, settings.first_timeout_s))
        self._requests = RequestQueue(settings.concurrency, settings.max_waiting)
        self._timeouts = Timeouts(
            cost_model,
            draft_timeout_s=settings.draft_timeout_s,
            verify_timeout_s=settings.verify_timeout_s,
        )
        self._admission = Admission(
            tokenizer, vocabulary.size, cost_model, max_prompt_tokens=settings.max_prompt_tokens
        )
        self._status = StatusReporter(
            pid,
            settings.model,
            registry=self._registry,
            requests=self._requests,
            estimates=cost_model,
        )
        self._now = 0.0
        """When the loop woke up last."""
        self._reads_target = False
        """Whether the verifier was asked for features."""
        self._lost = ""
        """Why there will be no verifier any more, if so."""

    def run(self) -> None:
        """Serve until the process ends."""
        poller = Poller([self._services, self._clients])
        while True:
            poller.wait(seconds_left(self._requests, _TICK_S, time.monotonic()))
            self._now = time.monotonic()
            while received := self._services.receive():
                self._on_service_message(*received)
            while request := self._clients.receive():
                self._on_client_message(*request)
            self._check_deadlines()
            self.estimates.save_if_due(self._now)

    # ------------------------------------------------------------ services

    def _on_service_message(self, address: bytes, message: FromService | ProtocolError) -> None:
        peer = self._registry.find(address)
        is_result = not isinstance(message, Heartbeat | Hello)
        self._registry.hang_detector.on_message(address, is_result=is_result)
        # The one that the target waits for goes first.
        if isinstance(message, VerificationOutcome) and peer is not None:
            self._on_outcome(peer, message)
            return
        match message:
            case Hello():
                self._on_hello(Peer(address, message))
            case _ if peer is None:
                self._services.send(address, Identify())
            case Heartbeat():
                self._on_heartbeat(peer, message)
            case ProtocolError():
                self._mark_for_kill(
                    peer, f"the {peer.hello.role} sent an invalid message: {message}"
                )
            case DraftTree():
                self._on_tree(message)
            case Features():
                self._on_features(peer, message)
            case Failed():
                self._on_failed(peer.hello.role, message)
            case Prefilled():
                self._on_prefilled(peer.hello.role, message)

    def _mark_for_kill(self, peer: Peer, reason: str) -> None:
        """It hangs or sends invalid messages: the supervisor ends it; a drafter is left at once."""
        if peer.hello.role == "drafter":
            self._on_service_down(
                ServiceDown(role="drafter", pid=peer.hello.pid, reason=reason, final=False)
            )
        self._registry.mark_for_kill(peer, reason)

    def _on_heartbeat(self, peer: Peer, message: Heartbeat) -> None:
        self._services.send(peer.address, message)
        request = self._requests.running.get(message.sequence)
        if request is not None and peer.hello.role == "verifier":
            self._timeouts.start(request, self._now)  # a long prefill may go on

    def _on_outcome(self, verifier: Peer, message: VerificationOutcome) -> None:
        request = self._requests.running.get(message.sequence)
        if request is None or verifier.hello.role != "verifier":
            return
        sequence = request.sequence
        precomputed = sequence.is_precomputed(message)
        if precomputed:
            frame = request.frames[message.accepted, message.bonus]
            self._services.send(verifier.address, frame)
            sequence.recorder.add_dispatch(self._now, time.monotonic())
        sequence.recorder.verifying_since = None
        for action in sequence.decide(message, self._now):
            sent = isinstance(action, ToVerifier) and isinstance(action.message, Verify)
            if precomputed and sent:
                self._timeouts.start(request, self._now)
            else:
                self._do(request, action)
        # The target is busy again: now there is time for the books.
        self._do_all(request, sequence.record(self._now))

    def _on_tree(self, message: DraftTree) -> None:
        request = self._requests.running.get(message.sequence)
        if request is not None:
            request.sequence.recorder.add_tree(message, self._now)
            self._do_all(request, request.sequence.on_tree(message, self._now))
        self._timeouts.on_draft(request, self._now)

    def _on_prefilled(self, role: Role, message: Prefilled) -> None:
        if request := self._requests.running.get(message.sequence):
            request.on_prefilled(message, role, self._now)

    def _on_features(self, peer: Peer, message: Features) -> None:
        """What the drafter reads of the target goes to it as it came."""
        drafter = self._registry.peers.get("drafter")
        if peer.hello.role == "drafter":
            self._mark_for_kill(peer, "the drafter sent an invalid message: features")
        elif drafter is not None and drafter.hello.features is not None:
            self._services.send(drafter.address, message)

    def _request_features(self) -> None:
        """Have the verifier send what the present drafter reads of the target, if anything."""
        verifier, drafter = (self._registry.peers.get(role) for role in ("verifier", "drafter"))
        wanted = drafter.hello.features if drafter is not None else None
        self._registry.unreadable = ""
        if verifier is not None and (wanted is not None or self._reads_target):
            self._services.send(verifier.address, ReadTarget(features=wanted))
            self._reads_target = wanted is not None

    def _on_failed(self, role: Role, message: Failed) -> None:
        if role == "verifier" and message.sequence == 0:
            self._registry.unreadable = message.error
        request = self._requests.running.get(message.sequence)
        ids = request.ids if request is not None else {}
        _log.warning("the %s failed: %s", role, message.error, extra=ids)
        if request is not None and role == "verifier":
            reason = f"the verifier failed: {message.error}"
            self._do_all(request, request.sequence.finish("error", reason))
        elif request is not None:
            self._do_all(request, request.sequence.on_drafter_lost("drafter_failed"))

    def _on_hello(self, peer: Peer) -> None:
        role = peer.hello.role
        if peer.hello.pid in self._registry.marked_for_kill:
            return  # it is about to be ended
        if (reason := handshake_error(peer.hello, self._vocabulary)) is not None:
            self._registry.rejected[role] = reason
            self._services.send(peer.address, Rejected(reason))
            return
        if self._registry.is_outdated(peer):  # a swap's old drafter, that came back last
            self._services.send(peer.address, Stop())
            return
        old = self._registry.add(peer)
        self.estimates.load_for(self._registry.peers)
        self._services.send(peer.address, Welcome())
        if old is not None and old.address != peer.address:
            self._services.send(old.address, Stop())
        self._lost = "" if role == "verifier" else self._lost
        self._request_features()
        for request in list(self._requests.running.values()):
            self._do_all(request, request.on_service_replaced(peer.hello))

    def _on_service_down(self, message: ServiceDown) -> None:
        current = self._registry.remove(message.role, message.pid)
        if message.role == "verifier" and message.final:
            self._lost = message.reason
            for request in list(self._requests):
                self._do_all(request, request.sequence.finish("error", message.reason))
        for request in list(self._requests.running.values()) if current else ():
            self._do_all(request, request.on_service_lost(message.role))

    # ------------------------------------------------------------ clients

    def _on_client_message(self, peer: bytes, message: ToOrchestrator | ProtocolError) -> None:
        match message:
            case Generate():
                self._on_generate(peer, message)
            case Cancel():
                if request := self._requests.find(peer, message.request):
                    self._do_all(request, request.sequence.finish("cancelled"))
            case StatusRequest():
                serving = self._requests.find(peer, message.request) is not None
                dropped = self._services.dropped + self._clients.dropped
                status = self._status.report(
                    message, serving=serving, dropped=dropped, now=self._now
                )
                self._clients.send(peer, status)
            case ServiceDown():
                self._on_service_down(message)
            case ProtocolError():
                self._clients.send(peer, Rejected(str(message)))

    def _on_generate(self, peer: bytes, message: Generate) -> None:
        if self._requests.find(peer, message.request) is not None:
            return  # it is being answered
        if self._lost or self._requests.full:
            kind: RejectedKind = "unavailable" if self._lost else "busy"
            self._clients.send(peer, Rejected(self._lost or _BUSY, kind, message.request))
            return
        try:
            request = self._admission.admit(
                peer, message, context_length=self._registry.context_length, now=self._now
            )
        except UsageError as error:
            self._clients.send(peer, Rejected(str(error), "invalid", message.request))
            return
        if message.count_only:
            for answer in request.last_messages("length", ""):
                self._clients.send(peer, answer)
            return
        self._requests.waiting.append(request)
        self._start_waiting()

    def _start_waiting(self) -> None:
        for request in self._requests.start(self._registry.kv_tokens):
            self._count_streams()
            for peer in self._registry.peers.values():
                self._do_all(request, request.on_service_up(peer.hello))

    def _count_streams(self) -> None:
        self.estimates.cost_model.batch.streams = max(1, len(self._requests.running))

    # ------------------------------------------------------------ actions

    def _do_all(self, request: Request, actions: Iterable[Action]) -> None:
        for action in actions:
            self._do(request, action)

    def _do(self, request: Request, action: Action) -> None:
        match action:
            case ToVerifier(message) | ToDrafter(message):
                role: Role = "verifier" if isinstance(action, ToVerifier) else "drafter"
                self._send_to_service(role, message)
                self._timeouts.start(request, time.monotonic())
            case PrecomputeVerify(accepted, bonus, verify):
                request.frames[accepted, bonus] = encode(verify)
            case Emit(tokens):
                if not request.is_stopped and tokens:
                    self._emit(request, action)
            case Finish(reason, error):
                self._finish(request, reason, error)

    def _send_to_service(self, role: Role, message: Message) -> None:
        if (peer := self._registry.peers.get(role)) is not None:
            self._services.send(peer.address, message)

    def _emit(self, request: Request, emit: Emit) -> None:
        text = request.add_tokens(emit.tokens, emit.origins, emit.logprobs)
        if not self._clients.send(request.peer, text):
            request.is_unreachable = True
            self._do_all(request, request.sequence.finish("cancelled"))
        elif request.is_stopped:
            self._do_all(request, request.sequence.finish("stop"))

    def _finish(self, request: Request, reason: FinishReason, error: str) -> None:
        self._requests.remove(request)
        self._count_streams()
        for message in request.last_messages(reason, error):
            if not self._clients.send(request.peer, message):
                break  # what follows would hide that something is missing
        self._start_waiting()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        self._requests.update_window(now)
        for request, actions in self._timeouts.expire(self._requests.running.values(), now):
            self._do_all(request, actions)
        for peer, reason in self._registry.find_hanging(now):
            self._mark_for_kill(peer, reason)
        self._services.keep_bound(now)
        self._clients.keep_bound(now)
