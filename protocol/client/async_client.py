"""The asyncio client of an orchestrator: many concurrent requests."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import zmq
import zmq.asyncio

from protocol.client.request_session import SILENCE_S, RequestSession
from protocol.errors import DeadlineExceeded, RuntimeFailure
from protocol.messages import (
    Cancel,
    Finished,
    FromOrchestrator,
    Generate,
    Message,
    Progress,
    Status,
    StatusRequest,
    Text,
)
from protocol.process.closeable import Closeable
from protocol.process.deadline import Deadline
from protocol.transport.channel import configure
from protocol.transport.codec import Decoder, encode

_MOST_SOCKETS = 8192
"""Most concurrent requests; each has a socket."""

Inbound = TypeVar("Inbound", bound=Message)

_DECODER: Decoder[FromOrchestrator] = Decoder(FromOrchestrator)


class AsyncConnection(Generic[Inbound]):
    """One connection. Each request has its own, so that no two answers can be mixed up."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, decoder: Decoder[Inbound]
    ) -> None:
        self._decoder = decoder
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        # The plain socket below it: messages are also sent where awaiting is impossible.
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        configure(self._plain, address)
        self._plain.connect(address)

    def send(self, message: Message) -> None:
        """Queue a message; raise RuntimeFailure if the peer no longer reads."""
        try:
            self._plain.send(encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise RuntimeFailure("the orchestrator has stopped reading its messages") from error

    async def receive(self, timeout_s: float) -> Inbound | None:
        """Return the next message; None if none arrives within `timeout_s` seconds."""
        if not await self._socket.poll(max(0, round(1e3 * timeout_s))):
            return None
        return self._decoder.decode(await self._socket.recv())

    def close(self) -> None:
        """Close the connection; queued messages are still delivered."""
        self._socket.close()


class AsyncClient(Closeable):
    """Sends requests to one orchestrator, from as many event loops as there are."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = _MOST_SOCKETS
        # A lock belongs to the loop in which a task first waits for it.
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            WeakKeyDictionary()
        )

    async def status(self, timeout_s: float = 10.0) -> Status:
        """Return the stack's status; raise DeadlineExceeded if the orchestrator does not answer."""
        line = AsyncConnection(self._context, self._address, _DECODER)
        try:
            line.send(StatusRequest())
            deadline = Deadline(timeout_s)
            while not deadline.passed:
                reply = await line.receive(min(SILENCE_S, deadline.remaining))
                if isinstance(reply, Status):
                    return reply
                if reply is None:  # the question may have been lost in a restart
                    line.send(StatusRequest())
        finally:
            line.close()
        raise DeadlineExceeded(f"no status of the orchestrator within {timeout_s:g} s")

    async def generate(
        self, request: Generate, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> AsyncGenerator[Text | Finished]:
        """Stream an answer: Text messages, then one Finished. Closing the generator cancels.

        Args:
            request: the request; its number must not be 0.
            on_progress: called during prefill if the request has `progress` set.

        Raises:
            UsageError: the request is invalid.
            Busy: too many requests wait already.
            RuntimeFailure: the request failed, or the orchestrator is gone.
        """
        session = RequestSession(request)
        await self._wait_for_turn()
        line = AsyncConnection(self._context, self._address, _DECODER)
        done = False
        try:
            line.send(request)
            while not done:
                message = await line.receive(SILENCE_S)
                if message is None:
                    line.send(session.on_silence())
                elif isinstance(message, Progress):
                    session.handle(message)  # a sign of life
                    on_progress(message)
                elif isinstance(event := session.handle(message), Generate):
                    line.send(event)
                elif event is not None:
                    done = isinstance(event, Finished)
                    yield event
        finally:
            try:
                await self._wait_for_turn()
            finally:
                if not done:
                    line.send(Cancel(request=request.request))
                line.close()

    async def _wait_for_turn(self) -> None:
        """Let one connection be opened or closed per step of the loop: each takes half a ms."""
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with turn:
            await asyncio.sleep(0)

    def close(self) -> None:
        """Close all connections; safe to call twice."""
        self._context.destroy(linger=200)
