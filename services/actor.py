"""The loop that every service runs: shake hands, then one message in, its answers out.

A service answers a message with an iterator. Between two answers the loop looks for news
and lets the service say whether it makes the rest of the answers pointless: that is how a
tree for a round that is over is dropped within one step. It also beats (`pulse.py`).
"""

import logging
import os
from collections import deque
from collections.abc import Generator
from contextlib import closing
from typing import Protocol

import msgspec

from protocol.channel import Channel
from protocol.errors import ModelError, ProtocolError
from protocol.messages import (
    PROTOCOL_VERSION,
    Alive,
    CloseSequence,
    Failed,
    FromService,
    Hello,
    Introduce,
    OpenSequence,
    Refusal,
    Role,
    Stop,
    ToService,
    Welcome,
)
from services.inbox import Inbox, Work

_log = logging.getLogger(__name__)

_HANDSHAKE_S = 30.0


class Service(Protocol):
    """What the loop needs of a verifier or drafter."""

    def handle(self, message: Work) -> Generator[FromService | None]:
        """Do the work of one message, yielding its answers as they are ready.

        None is a point in long work where it may be abandoned.
        """
        ...

    def supersedes(self, news: Work, current: Work) -> bool:
        """Whether `news` makes the remaining answers to `current` pointless."""
        ...


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a service says of itself in Hello, besides what the loop knows."""

    role: Role
    backend: str
    model: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    context_length: int
    compute_unit: str
    max_draft_tokens: int
    emulated_cost: str = ""


def serve(channel: Channel[ToService], identity: Identity, service: Service) -> None:
    """Shake hands and serve until told to stop; again if the orchestrator was restarted.

    Raises:
        ModelError: the orchestrator refused us; the message is its reason.
        DeadlineExceeded: the orchestrator did not answer the handshake, or fell silent.
    """
    inbox = Inbox(channel)
    while True:
        shake_hands(channel, identity)
        if _serve(channel, inbox, service):
            return


def _serve(channel: Channel[ToService], inbox: Inbox, service: Service) -> bool:
    """Serve one orchestrator; True if it said stop, False if there is a new one."""
    opened: set[int] = set()
    inbox.start()
    while True:
        inbox.wait()
        if inbox.forgotten:
            for number in opened:
                deque(service.handle(CloseSequence(sequence=number)), maxlen=0)
            return False
        if not inbox.messages:
            continue
        match message := inbox.messages.popleft():
            case Stop():
                return True
            case OpenSequence(sequence=number):
                opened.add(number)
            case CloseSequence(sequence=number):
                opened.discard(number)
        _work(message, channel, inbox, service)


def _work(message: Work, channel: Channel[ToService], inbox: Inbox, service: Service) -> None:
    with closing(service.handle(message)) as answers:
        while True:
            try:
                answer = next(answers, _DONE)
            # One request must not take the process down; its sequence fails with the reason.
            except Exception as error:  # noqa: BLE001
                _log.exception("%s of sequence %d failed", type(message).__name__, message.sequence)
                reason = f"{type(error).__name__}: {error}"
                channel.send(Failed(sequence=message.sequence, error=reason))
                return
            if isinstance(answer, _Done):
                return
            if answer is not None:
                channel.send(answer)
                inbox.pulse.said()
            inbox.look(message.sequence)
            if inbox.forgotten or any(
                isinstance(n, Stop) or service.supersedes(n, message) for n in inbox.messages
            ):
                return


class _Done:
    """Stands for the end of a service's answers."""


_DONE = _Done()


def shake_hands(channel: Channel[ToService], identity: Identity) -> None:
    """Say Hello and wait to be welcomed; errors as for `serve`."""
    channel.send(
        Hello(
            protocol=PROTOCOL_VERSION,
            role=identity.role,
            pid=os.getpid(),
            backend=identity.backend,
            model=identity.model,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            vocabulary_size=identity.vocabulary_size,
            context_length=identity.context_length,
            compute_unit=identity.compute_unit,
            max_draft_tokens=identity.max_draft_tokens,
            emulated_cost=identity.emulated_cost,
        )
    )
    while True:
        match channel.receive(_HANDSHAKE_S, "answer to Hello from the orchestrator"):
            case Welcome():
                return
            case Refusal(reason=reason):
                raise ModelError(reason)
            case Alive() | Introduce():
                pass  # an answer to a beat before the Hello
            case other:
                raise ProtocolError(f"expected Welcome or Refusal, got {type(other).__name__}")
