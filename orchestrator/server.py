"""The orchestrator's edge: sockets and clock around the pure state of its sequences.

The loop: wait; take what the drafter sent; take what the verifier sent, and send the next
`Verify` before anything else; then clients. Text is decoded and streamed after that, while
the target is busy.
"""

import logging
import time
from collections.abc import Iterable

from orchestrator.hang_detector import HangDetector
from orchestrator.learning.estimate_store import EstimateStore
from orchestrator.registry import Peer, Registry, handshake_error
from orchestrator.requests.admission import admit
from orchestrator.requests.comings import on_service_lost, on_service_replaced, on_service_up
from orchestrator.requests.queue import RequestQueue
from orchestrator.requests.request import Request, time_left
from orchestrator.requests.timeouts import Timeouts
from orchestrator.sequence.actions import (
    Action,
    Emit,
    Finish,
    PrecomputeVerify,
    ToDrafter,
    ToVerifier,
)
from orchestrator.status import overview
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.vocabulary import Vocabulary
from protocol.errors import ProtocolError, UsageError
from protocol.messages import (
    Cancel,
    DraftTree,
    Failed,
    FinishReason,
    FromService,
    Generate,
    Heartbeat,
    Hello,
    Identify,
    Message,
    Prefilled,
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
from protocol.process.logs import about
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
        self._settings = settings
        self._services = services
        self._clients = clients
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self.memory = EstimateStore(settings.learned_dir, settings.machine)
        vigil = HangDetector(settings.hang_timeout_s, settings.first_timeout_s)
        self._registry = Registry(vigil, pid, settings.model)
        self._deadlines = Timeouts(settings, self.memory.estimates)
        self._requests = RequestQueue(settings.concurrency, settings.max_waiting)
        self._next_number = 1
        self._woke = 0.0
        self._lost = ""
        """Why there will be no verifier any more, if so."""

    def run(self) -> None:
        """Serve until the process is told to end."""
        poller = Poller([self._services, self._clients])
        while True:
            poller.wait(time_left(self._requests, _TICK_S, time.monotonic()))
            self._woke = time.monotonic()
            while received := self._services.receive():
                self._from_service(*received)
            while request := self._clients.receive():
                self._from_client(*request)
            self._check_deadlines()
            self.memory.keep(self._woke)

    def _from_service(self, address: bytes, message: FromService | ProtocolError) -> None:
        peer = self._registry.at(address)
        self._registry.vigil.heard(address, worked=not isinstance(message, Heartbeat | Hello))
        # The one that the target waits for goes first.
        if isinstance(message, VerificationOutcome) and peer is not None:
            self._outcome(peer, message)
            return
        match message:
            case Hello():
                self._hello(Peer(address, message))
            case _ if peer is None:
                self._services.send(address, Identify())
            case Heartbeat():
                self._alive(peer, message)
            case ProtocolError():
                self._mark_for_kill(peer, f"the {peer.hello.role} sent nonsense: {message}")
            case DraftTree():
                self._tree(message)
            case Failed():
                self._failed(peer.hello.role, message)
            case Prefilled():
                if answer := self._requests.running.get(message.sequence):
                    answer.prefilled(message, peer.hello.role, self._woke)

    def _mark_for_kill(self, peer: Peer, reason: str) -> None:
        """It hangs or talks nonsense: the supervisor ends it; a drafter is left at once."""
        if peer.hello.role == "drafter":
            self._service_down(
                ServiceDown(role="drafter", pid=peer.hello.pid, reason=reason, final=False)
            )
        self._registry.mark_for_kill(peer, reason)

    def _alive(self, peer: Peer, message: Heartbeat) -> None:
        self._services.send(peer.address, message)
        answer = self._requests.running.get(message.sequence)
        if answer is not None and peer.hello.role == "verifier":
            self._deadlines.expect(answer, self._woke)  # a long prefill may go on

    def _outcome(self, verifier: Peer, message: VerificationOutcome) -> None:
        answer = self._requests.running.get(message.sequence)
        if answer is None or verifier.hello.role != "verifier":  # nobody else may say it
            return
        foreseen = answer.sequence.foreseen(message)
        if foreseen:
            frame = answer.frames[message.accepted, message.bonus]
            self._services.send(verifier.address, frame)
            answer.sequence.recorder.dispatched(self._woke, time.monotonic())
        answer.sequence.recorder.verifying_since = None
        for action in answer.sequence.outcome(message, self._woke):
            if foreseen and isinstance(action, ToVerifier) and isinstance(action.message, Verify):
                self._deadlines.expect(answer, self._woke)  # it is on its way
            else:
                self._act(answer, action)

    def _tree(self, message: DraftTree) -> None:
        answer = self._requests.running.get(message.sequence)
        if answer is not None:
            answer.sequence.recorder.drew(message, self._woke)
            self._do(answer, answer.sequence.tree(message, self._woke))
        self._deadlines.draft_came(answer, self._woke)

    def _failed(self, role: Role, message: Failed) -> None:
        ids = about(sequence=message.sequence)
        _log.warning("the %s failed: %s", role, message.error, extra=ids)
        answer = self._requests.running.get(message.sequence)
        if answer is not None and role == "verifier":
            reason = f"the verifier failed: {message.error}"
            self._do(answer, answer.sequence.finish("error", reason))
        elif answer is not None:
            self._do(answer, answer.sequence.drafter_down("drafter_failed"))

    def _hello(self, peer: Peer) -> None:
        role = peer.hello.role
        if peer.hello.pid in self._registry.marked_for_kill:
            return  # it is about to be ended
        if (reason := handshake_error(peer.hello, self._vocabulary)) is not None:
            self._registry.refused[role] = reason
            self._services.send(peer.address, Rejected(reason))
            return
        if self._registry.outlived(peer):  # a swap's old drafter, that came back last
            self._services.send(peer.address, Stop())
            return
        old = self._registry.adopt(peer)
        self.memory.meet(self._registry.peers)
        self._services.send(peer.address, Welcome())
        if old is not None and old.address != peer.address:
            self._services.send(old.address, Stop())
        self._lost = "" if role == "verifier" else self._lost
        for answer in list(self._requests.running.values()):
            self._do(answer, on_service_replaced(answer, peer.hello))

    def _service_down(self, message: ServiceDown) -> None:
        current = self._registry.drop(message.role, message.pid)
        if message.role == "verifier" and message.final:
            self._lost = message.reason
            for answer in list(self._requests):
                self._do(answer, answer.sequence.finish("error", message.reason))
        for answer in list(self._requests.running.values()) if current else ():
            self._do(answer, on_service_lost(answer, message.role))

    # ------------------------------------------------------------ clients

    def _from_client(self, peer: bytes, message: ToOrchestrator | ProtocolError) -> None:
        match message:
            case Generate(request=number):
                if self._requests.of(peer, number) is None:  # else it is being answered
                    self._generate(peer, message)
            case Cancel():
                if answer := self._requests.of(peer, message.request):
                    self._do(answer, answer.sequence.finish("cancelled"))
            case StatusRequest():
                serving = self._requests.of(peer, message.request) is not None
                dropped = self._services.dropped + self._clients.dropped
                status = self._registry.status(*self._requests.counts, message, serving, dropped)
                told = overview(status, self._requests, self.memory.estimates, self._woke)
                self._clients.send(peer, told)
            case ServiceDown():
                self._service_down(message)
            case ProtocolError():
                self._clients.send(peer, Rejected(str(message)))

    def _generate(self, peer: bytes, message: Generate) -> None:
        if self._lost or self._requests.full:
            kind: RejectedKind = "unavailable" if self._lost else "busy"
            self._clients.send(peer, Rejected(self._lost or _BUSY, kind, message.request))
            return
        try:
            answer = admit(
                message,
                peer=peer,
                number=self._next_number,
                tokenizer=self._tokenizer,
                vocabulary_size=self._vocabulary.size,
                context_length=self._registry.context_length,
                max_prompt_tokens=self._settings.max_prompt_tokens,
                estimates=self.memory.estimates,
                now=self._woke,
            )
        except UsageError as error:
            self._clients.send(peer, Rejected(str(error), "invalid", message.request))
            return
        if message.count_only:
            for reply in answer.farewell("length", ""):
                self._clients.send(peer, reply)
            return
        self._next_number += 1
        self._requests.waiting.append(answer)
        self._start_waiting()

    def _start_waiting(self) -> None:
        for answer in self._requests.start(self._registry.kv_tokens):
            self._share()
            for peer in self._registry.peers.values():
                self._do(answer, on_service_up(answer, peer.hello))

    def _share(self) -> None:
        self.memory.estimates.crowd.streams = max(1, len(self._requests.running))

    def _do(self, answer: Request, actions: Iterable[Action]) -> None:
        for action in actions:
            self._act(answer, action)

    def _act(self, answer: Request, action: Action) -> None:
        match action:
            case ToVerifier(message) | ToDrafter(message):
                role: Role = "verifier" if isinstance(action, ToVerifier) else "drafter"
                self._to_service(role, message)
                self._deadlines.expect(answer, time.monotonic())
            case PrecomputeVerify(accepted, bonus, verify):
                answer.frames[accepted, bonus] = encode(verify)
            case Emit(tokens, origins, logprobs):
                if not answer.stopped and tokens:
                    self._emit(answer, answer.push(tokens, origins, logprobs))
            case Finish(reason, error):
                self._finish(answer, reason, error)

    def _to_service(self, role: Role, message: Message | bytes) -> None:
        if (peer := self._registry.peers.get(role)) is not None:
            self._services.send(peer.address, message)

    def _emit(self, answer: Request, message: Message) -> None:
        if not self._clients.send(answer.peer, message):
            answer.unheard = True
            self._do(answer, answer.sequence.finish("cancelled"))
        elif answer.stopped:
            self._do(answer, answer.sequence.finish("stop"))

    def _finish(self, answer: Request, reason: FinishReason, error: str) -> None:
        self._requests.drop(answer)
        self._share()
        for message in answer.farewell(reason, error):
            if not self._clients.send(answer.peer, message):
                break  # what follows would hide that something is missing
        self._start_waiting()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        self._requests.count(now)
        for answer, actions in self._deadlines.passed(self._requests.running.values(), now):
            self._do(answer, actions)
        for peer, reason in self._registry.hanging(now):
            self._mark_for_kill(peer, reason)
        self._services.keep_bound(now)
        self._clients.keep_bound(now)
