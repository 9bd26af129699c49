"""The loop that every service runs: handshake, then one step of one message at a time.

A service answers a message with an iterator. Between two steps the loop checks for new messages,
which may make the remaining answers pointless (a tree for a finished round is dropped within one
step), and switches between sequences. It also sends heartbeats.
"""

import logging
import os
import time
from collections import deque

import msgspec

from protocol.errors import BackendLost, ModelError, OutOfMemory, ProtocolError
from protocol.messages import (
    MAX_ERROR,
    PROTOCOL_VERSION,
    CloseSequence,
    DraftTree,
    Failed,
    FeatureRequest,
    Features,
    FromService,
    Heartbeat,
    Hello,
    Identify,
    PassTimes,
    Prefilled,
    Prepared,
    RankStatus,
    Rejected,
    Role,
    Stop,
    VerificationOutcome,
    Welcome,
)
from protocol.process.heap import freeze_heap
from protocol.process.logs import about
from services.runtime.heartbeat import HeartbeatTimer
from services.runtime.inbox import Connection, Inbox
from services.runtime.preparation import Preparer
from services.runtime.work_queue import Job, Service, WorkQueue

_log = logging.getLogger(__name__)

_BORN_NS = time.monotonic_ns()
SEND_S = 5.0
"""Longest wait for an orchestrator that reads slowly: it may be busy with many requests."""
_QUIET_S = 0.2
"""How long nothing must have been asked before preparation goes on: a client's next request often
follows its last one at once.
"""
_BUSY_S, _APART_S = 30.0, 2.0
"""After so long without an idle moment a step runs between two rounds; and how rarely then."""
_LONG_S = 6.0
"""Duration that is announced for a step of preparation: the first of a kind compiles kernels."""


class Identity(msgspec.Struct, kw_only=True):
    """The fields of Hello that differ by service; preparation may change them."""

    role: Role
    backend: str
    model: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    context_length: int
    compute_unit: str
    max_draft_tokens: int
    kv_tokens: int = 0
    kv_limit: str = ""
    rewinding: str = ""
    weight_bytes: int = 0
    ranks: list[RankStatus] = []
    pass_times: PassTimes = PassTimes()
    features: FeatureRequest | None = None
    takes_trees: bool = False


def serve(
    channel: Connection,
    identity: Identity,
    service: Service,
    inbox: Inbox | None = None,
    preparer: Preparer | None = None,
) -> None:
    """Shake hands and serve until told to stop; again if the orchestrator was restarted.

    Args:
        channel: to the orchestrator.
        identity: of the service.
        service: handles the messages.
        inbox: the channel's, for a service that reads from it directly.
        preparer: of what is left to be prepared between requests.

    Raises:
        ModelError: the orchestrator rejected this service; the message is its reason.
        DeadlineExceeded: the orchestrator did not answer the handshake or the heartbeats.
    """
    inbox, preparer = inbox or Inbox(channel), preparer or Preparer()
    freeze_heap()
    while True:
        if not shake_hands(channel, identity, preparer):
            return
        prepare = _Preparing(channel, inbox, identity, preparer)
        if _serve(channel, inbox, service, prepare):
            return


class _Preparing:
    """Prepares while an orchestrator has nothing to ask."""

    def __init__(
        self, channel: Connection, inbox: Inbox, identity: Identity, preparer: Preparer
    ) -> None:
        self._channel, self._inbox = channel, inbox
        self._identity, self._preparer = identity, preparer
        self._is_quiet = self._is_due = False
        self._busy_until = time.monotonic() + _BUSY_S

    def stop(self) -> None:
        """Record that there is work. One step follows it, however soon there is more."""
        self._is_quiet, self._is_due = False, True

    def step(self, *, is_open: bool) -> bool:
        """Run a step if no message comes; False if there is none to run now."""
        if self._preparer.is_complete:
            return False
        may_go = self._preparer.goes_on_between_rounds and time.monotonic() >= self._busy_until
        if is_open and not may_go:
            return False
        if is_open:
            self._run(_APART_S)
        elif self._is_quiet or self._is_due or not self._inbox.linger(_QUIET_S):
            self._is_quiet, self._is_due = not self._is_due, False
            self._run(_BUSY_S)
        self._inbox.look(0)
        return True

    def _run(self, apart_s: float) -> None:
        self._inbox.heartbeat.beat(expected_s=_LONG_S)
        if self._preparer.step():
            self._channel.send(
                Prepared(
                    preparation=self._preparer.state,
                    pass_times=self._identity.pass_times,
                    takes_trees=self._identity.takes_trees,
                )
            )
            if self._preparer.is_complete:
                freeze_heap()
        self._busy_until = time.monotonic() + apart_s


def _serve(channel: Connection, inbox: Inbox, service: Service, prepare: _Preparing) -> bool:
    """Serve one orchestrator; True if it sent a stop, False if there is a new one."""
    queue = WorkQueue(service)
    inbox.start()
    while True:
        if queue:
            prepare.stop()
            prepare.step(is_open=True)
            inbox.look(queue.next().message.sequence)
        elif not prepare.step(is_open=queue.has_open):
            inbox.wait()
        if inbox.forgotten:
            for number in queue.clear():
                deque(service.handle(CloseSequence(sequence=number)), maxlen=0)
            return False
        while inbox.messages:
            message = inbox.messages.popleft()
            if isinstance(message, Stop):
                queue.clear()
                return True
            queue.add(message)
        if not queue:
            continue
        job = queue.next()
        if job.answers is None or not inbox.linger(service.linger_s(job.message)):
            queue.rotate(job)
            _step(job, channel, inbox, queue, service)


def _step(job: Job, channel: Connection, inbox: Inbox, queue: WorkQueue, service: Service) -> None:
    """Run a job up to its next answer."""
    message = job.message
    try:
        if job.answers is None:
            job.answers = service.handle(message)
        answer = next(job.answers, _DONE)
        while isinstance(answer, Features):  # sent immediately, before the answer they belong to
            channel.send(answer)
            answer = next(job.answers, _DONE)
    except BackendLost:
        raise
    # One request must not take the process down; its sequence fails with the reason.
    except Exception as error:  # noqa: BLE001
        ids = about(sequence=message.sequence, round=getattr(message, "round", 0))
        _log.exception(
            "%s of sequence %d failed", type(message).__name__, message.sequence, extra=ids
        )
        queue.finish(job)
        kind = "" if isinstance(error, OutOfMemory) else f"{type(error).__name__}: "
        sentence = f"{kind}{error}"[:MAX_ERROR]
        channel.send(Failed(sequence=message.sequence, error=sentence))
        return
    if isinstance(answer, _Done):
        queue.finish(job)
    elif answer is not None:
        channel.send(_stamp(answer))
        inbox.heartbeat.on_send()


def _stamp(answer: FromService) -> FromService:
    """Set the time at which the work for the answer ended: now, unless it has one."""
    if isinstance(answer, Prefilled | VerificationOutcome | DraftTree) and not answer.at_ns:
        return msgspec.structs.replace(answer, at_ns=time.monotonic_ns())
    return answer


class _Done:
    """Marks the end of a service's answers."""


_DONE = _Done()


def shake_hands(channel: Connection, identity: Identity, preparer: Preparer | None = None) -> bool:
    """Send Hello and wait for Welcome; False if told to stop instead. Errors as for `serve`.

    A Hello may be lost with an orchestrator that dies, so beats are sent while waiting: its
    successor then asks for the identity.
    """
    hello = _hello(identity, preparer or Preparer())
    heartbeat, has_beaten = HeartbeatTimer(channel), False
    channel.send(hello)
    while True:
        if not channel.ready(heartbeat.wait_s):
            heartbeat.beat()
            has_beaten = True
            continue
        match channel.receive(0.0, "answer to Hello from the orchestrator"):
            case Welcome():
                return True
            case Stop():
                return False
            case Rejected(reason=reason):
                raise ModelError(reason)
            case Identify() if has_beaten:
                channel.send(hello)
                has_beaten = False
            case Heartbeat() | Identify():
                pass  # an answer to a beat before the Hello
            case other:
                raise ProtocolError(f"expected Welcome or Rejected, got {type(other).__name__}")


def _hello(identity: Identity, preparer: Preparer) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        pid=os.getpid(),
        started_ns=_BORN_NS,
        preparation=preparer.state,
        **msgspec.structs.asdict(identity),
    )
