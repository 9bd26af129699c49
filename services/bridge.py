"""The stdio backend: relays between the orchestrator and a program that drafts.

A relay and not a `DraftBackend`, so that the program gets every message as it comes: it keeps
its own streaming, and news can interrupt it. Whatever it does wrong ends this process with a
sentence; the supervisor's restart budget then decides, and requests decode plainly meanwhile.
"""

import logging
import time

from protocol.channel import Channel, Poller
from protocol.codec import MAX_MESSAGE_BYTES, Decoder, encode
from protocol.errors import (
    DeadlineExceeded,
    ModelError,
    ProtocolError,
    RuntimeFailure,
    StreamEnded,
)
from protocol.messages import (
    PROTOCOL_VERSION,
    Alive,
    CloseSequence,
    FromDrafter,
    Hello,
    Introduce,
    Refusal,
    Stop,
    ToDrafter,
    ToService,
    Welcome,
)
from protocol.settings import DrafterSettings
from protocol.stream import Stream, writable, write_some
from services.actor import Identity, shake_hands
from services.dues import Dues
from services.program import Program
from services.pulse import Pulse

_log = logging.getLogger(__name__)

_TICK_S = 0.2


def relay(settings: DrafterSettings, program: Program) -> None:
    """Relay until the orchestrator says stop.

    Raises:
        ModelError: the orchestrator refused the program.
        RuntimeFailure: the program ended, hung, or said something it must not.
    """
    try:
        _Relay(settings, program).run()
    except StreamEnded as error:
        raise RuntimeFailure(program.last_words()) from error
    except (ProtocolError, DeadlineExceeded) as error:
        raise RuntimeFailure(f"the draft command {program.name!r}: {error}") from error


def _identity(hello: FromDrafter, name: str) -> Identity:
    """What the program says of itself, as this process says it to the orchestrator."""
    if not isinstance(hello, Hello) or hello.role != "drafter":
        raise ProtocolError("its first message must be a drafter's Hello")
    if hello.protocol != PROTOCOL_VERSION:
        raise ModelError(
            f"the draft command {name!r} speaks protocol version {hello.protocol}, "
            f"not {PROTOCOL_VERSION}"
        )
    return Identity(
        role="drafter",
        backend="stdio",
        model=hello.model or name,
        tokenizer_fingerprint=hello.tokenizer_fingerprint,
        vocabulary_size=hello.vocabulary_size,
        context_length=hello.context_length,
        compute_unit=hello.compute_unit,
        max_draft_tokens=hello.max_draft_tokens,
    )


class _Relay:
    """One program's connection to the orchestrator."""

    def __init__(self, settings: DrafterSettings, program: Program) -> None:
        self._settings = settings
        self._program = program
        self._stream: Stream[FromDrafter] = Stream(
            program.reading, program.writing, Decoder(FromDrafter)
        )
        self._dues = Dues(settings.ready_timeout_s, settings.answer_timeout_s)
        self._unsent = bytearray()
        """What the program has not read yet."""

    def run(self) -> None:
        """Introduce the program, then relay; errors as for `relay`."""
        hello = self._stream.receive(self._settings.ready_timeout_s, "Hello (start_timeout_s)")
        identity = _identity(hello, self._program.name)
        _log.info("%s drafts: %s %s", self._program.name, identity.backend, identity.model)
        channel: Channel[ToService] = Channel(self._settings.address, Decoder(ToDrafter))
        with channel:
            self._introduce(channel, identity)
            self._stream.send(Welcome())
            try:
                while not self._relay(channel):
                    self._forget()
                    self._introduce(channel, identity)
            finally:
                if self._dues.stale:
                    _log.info("dropped %d messages of rounds that were over", self._dues.stale)

    def _introduce(self, channel: Channel[ToService], identity: Identity) -> None:
        try:
            shake_hands(channel, identity)
        except ModelError as error:
            self._stream.send(Refusal(str(error)))
            raise

    def _forget(self) -> None:
        """There is another orchestrator, to which what is open here means nothing."""
        for number in self._dues.sequences:
            self._to_program(CloseSequence(sequence=number), time.monotonic())

    def _relay(self, channel: Channel[ToService]) -> bool:
        """Relay until told to stop (True), or until the orchestrator is another one (False)."""
        pulse = Pulse(channel)
        poller = Poller([channel])
        poller.read(self._program.reading)
        while True:
            poller.write(self._program.writing, wanted=bool(self._unsent))
            waiting = channel.ready(0.0) or self._stream.ready(0.0)
            poller.wait(0.0 if waiting else _TICK_S)
            now = time.monotonic()
            # News first: it may make what the program says next worthless.
            while channel.ready(0.0):
                message = channel.receive(0.0, "message")
                pulse.heard()
                match message:
                    case Alive():
                        pass  # the answer to our own beat
                    case Introduce():
                        return False
                    case Stop():
                        self._to_program(message, now)
                        self._write()
                        return True
                    case _:
                        self._to_program(message, now)
            self._write()
            if self._stream.ready(0.0):
                self._from_program(self._stream.receive(0.0, "message"), channel, now)
            if overdue := self._dues.overdue(now):
                raise DeadlineExceeded(overdue)
            pulse.beat()

    def _from_program(self, message: FromDrafter, channel: Channel[ToService], now: float) -> None:
        if isinstance(message, Alive):
            self._to_program(message, now)  # answered as by an orchestrator
        answer = self._dues.answered(message, now)
        if answer is not None:
            channel.send(answer)

    def _to_program(self, message: ToService, now: float) -> None:
        self._dues.asked(message, now)
        self._unsent += encode(message)
        if len(self._unsent) > MAX_MESSAGE_BYTES:
            raise ProtocolError("it does not read what it is sent")

    def _write(self) -> None:
        while self._unsent and writable(self._program.writing, 0.0):
            del self._unsent[: write_some(self._program.writing, self._unsent)]
