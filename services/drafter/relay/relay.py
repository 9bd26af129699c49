"""The stdio and remote backends: relay between the orchestrator and an external drafter.

It is a relay and not a `DraftBackend`, so that the drafter gets every message immediately: it can
stream, and be interrupted by new messages. Any fault of the drafter ends this process with a
message; the supervisor's restart budget then decides, and requests decode plainly meanwhile.
"""

import logging

from protocol.errors import (
    DeadlineExceeded,
    ModelError,
    ProtocolError,
    RuntimeFailure,
    StreamEnded,
)
from protocol.messages import (
    PROTOCOL_VERSION,
    CloseSequence,
    FromDrafter,
    Heartbeat,
    Hello,
    Identify,
    Rejected,
    Stop,
    ToDrafter,
    ToService,
    Welcome,
)
from protocol.process.awake_clock import awake_time
from protocol.settings import DrafterSettings
from protocol.transport.channel import Channel, Poller
from protocol.transport.codec import Decoder
from services.drafter.relay.peer import DrafterPeer
from services.drafter.relay.pending_replies import PendingReplies
from services.runtime.heartbeat import HeartbeatTimer
from services.runtime.loop import SEND_S, Identity, shake_hands

_log = logging.getLogger(__name__)

_TICK_S = 0.2


def relay(settings: DrafterSettings, peer: DrafterPeer) -> None:
    """Relay until the orchestrator sends a stop.

    Raises:
        ModelError: the orchestrator refused the drafter.
        RuntimeFailure: the drafter ended, hung, was lost, or sent an invalid message.
    """
    try:
        _Relay(settings, peer).run()
    except StreamEnded as error:
        raise RuntimeFailure(peer.last_words(str(error))) from error
    except (ProtocolError, DeadlineExceeded) as error:
        raise RuntimeFailure(f"{peer.name}: {error}") from error


def _identity(hello: FromDrafter, peer: DrafterPeer) -> Identity:
    """Return the drafter's identity, as this process passes it on to the orchestrator."""
    if not isinstance(hello, Hello) or hello.role != "drafter":
        raise ProtocolError("its first message must be a drafter's Hello")
    if hello.protocol != PROTOCOL_VERSION:
        raise ModelError(
            f"{peer.name} speaks protocol version {hello.protocol}, not {PROTOCOL_VERSION}"
        )
    return Identity(
        role="drafter",
        backend=peer.backend,
        model=hello.model or peer.name,
        tokenizer_fingerprint=hello.tokenizer_fingerprint,
        vocabulary_size=hello.vocabulary_size,
        context_length=hello.context_length,
        compute_unit=hello.compute_unit,
        max_draft_tokens=hello.max_draft_tokens,
        pass_times=hello.pass_times,
        features=hello.features,
        takes_trees=hello.takes_trees,
    )


class _Relay:
    """One drafter's connection to the orchestrator."""

    def __init__(self, settings: DrafterSettings, peer: DrafterPeer) -> None:
        self._settings = settings
        self._peer = peer
        self._pending = PendingReplies(settings.ready_timeout_s, settings.answer_timeout_s)

    def run(self) -> None:
        """Introduce the drafter, then relay; errors as for `relay`."""
        try:
            hello = self._peer.receive(self._settings.ready_timeout_s, "Hello (start_timeout_s)")
            identity = _identity(hello, self._peer)
        except (ProtocolError, DeadlineExceeded) as error:
            hint = (
                "; a program that speaks the line protocol needs --draft-lines"
                if self._settings.command
                else ""
            )
            raise type(error)(f"{error}{hint}") from error
        _log.info("%s drafts: %s %s", self._peer.name, identity.backend, identity.model)
        channel: Channel[ToService] = Channel(
            self._settings.address, Decoder(ToDrafter), send_timeout_s=SEND_S
        )
        with channel:
            if not self._introduce(channel, identity):
                return
            self._peer.post(Welcome())
            try:
                while not self._relay(channel):
                    self._forget()
                    if not self._introduce(channel, identity):
                        return
            finally:
                if self._pending.stale:
                    _log.info("dropped %d messages of rounds that were over", self._pending.stale)

    def _introduce(self, channel: Channel[ToService], identity: Identity) -> bool:
        """Return True if the orchestrator welcomed us; pass a stop on to the drafter."""
        try:
            welcome = shake_hands(channel, identity)
        except ModelError as error:
            self._peer.post(Rejected(str(error)))
            self._peer.flush()
            raise
        if not welcome:
            self._peer.post(Stop())
            self._peer.flush()
        return welcome

    def _forget(self) -> None:
        """Close all sequences of the drafter: another orchestrator has taken over."""
        for number in self._pending.sequences:
            self._to_drafter(CloseSequence(sequence=number), awake_time())

    def _relay(self, channel: Channel[ToService]) -> bool:
        """Relay until told to stop (True), or until the orchestrator is another one (False)."""
        heartbeat = HeartbeatTimer(channel)
        poller = Poller([channel])
        while True:
            self._peer.watch(poller)
            waiting = channel.ready(0.0) or self._peer.ready(0.0)
            poller.wait(0.0 if waiting else _TICK_S)
            now = awake_time()
            # The orchestrator first: its message may make the drafter's next answer pointless.
            while channel.ready(0.0):
                message = channel.receive(0.0, "message")
                heartbeat.on_receive()
                match message:
                    case Heartbeat() | Welcome():
                        pass  # the answer to our own beat, or to a Hello that was sent twice
                    case Identify():
                        return False
                    case Stop():
                        self._to_drafter(message, now)
                        self._peer.flush()
                        return True
                    case _:
                        self._to_drafter(message, now)
            self._peer.flush()
            if self._peer.ready(0.0):
                self._from_drafter(self._peer.receive(0.0, "message"), channel, now)
            if overdue := self._pending.overdue(now):
                raise DeadlineExceeded(overdue)
            heartbeat.beat()

    def _from_drafter(self, message: FromDrafter, channel: Channel[ToService], now: float) -> None:
        if isinstance(message, Heartbeat):
            self._to_drafter(message, now)  # echo it, as an orchestrator does
        answer = self._pending.filter_reply(message, now)
        if answer is not None:
            channel.send(answer)

    def _to_drafter(self, message: ToService, now: float) -> None:
        self._pending.note_request(message, now)
        self._peer.post(message)
