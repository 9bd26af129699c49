"""The gateway's client of the model server: claim a model, and list the models."""

import contextlib
from collections.abc import Iterator

import zmq.asyncio

from protocol.client.async_client import AsyncConnection
from protocol.client.request_session import SILENCE_S, to_error
from protocol.errors import DeadlineExceeded, ProtocolError
from protocol.messages import (
    FromModelServer,
    ModelReady,
    Models,
    ModelsRequest,
    ModelStatus,
    Rejected,
    ReleaseModel,
    UseModel,
)
from protocol.process.closeable import Closeable
from protocol.process.deadline import Deadline
from protocol.transport.codec import Decoder

_DECODER: Decoder[FromModelServer] = Decoder(FromModelServer)


class ModelUse(Closeable):
    """A claim on a model, which stays loaded until this is closed."""

    def __init__(self, line: AsyncConnection[FromModelServer]) -> None:
        self._line: AsyncConnection[FromModelServer] | None = line

    async def await_ready(self, timeout_s: float) -> ModelReady:
        """Wait until the model can be used; return its description.

        Raises:
            SsdError: the model cannot be used; the message names the reason.
            DeadlineExceeded: it is not ready within `timeout_s` seconds.
        """
        deadline = Deadline(timeout_s)
        while self._line is not None and not deadline.passed:
            match await self._line.receive(min(SILENCE_S, deadline.remaining)):
                case None:
                    continue
                case ModelReady() as ready:
                    return ready
                case Rejected(reason=reason, kind=kind):
                    raise to_error(kind, reason)
                case other:
                    raise ProtocolError(f"{type(other).__name__} in the place of a model")
        raise DeadlineExceeded(f"the model was not loaded within {timeout_s:g} s (start_timeout_s)")

    def close(self) -> None:
        """Release the model; safe to call twice."""
        line, self._line = self._line, None
        if line is not None:
            line.send(ReleaseModel())
            line.close()


class ModelClient(Closeable):
    """Sends requests to one model server; used within one event loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.asyncio.Context()

    def use(self, model: str, drafter: str) -> ModelUse:
        """Ask for a model, and for one of its drafters unless that is ""; then await the result."""
        line = self._connect()
        line.send(UseModel(model=model, drafter=drafter))
        return ModelUse(line)

    async def list_models(self, timeout_s: float) -> list[ModelStatus]:
        """Return all models and their states; raise DeadlineExceeded without an answer."""
        with self._line() as line:
            line.send(ModelsRequest())
            answer = await line.receive(timeout_s)
        if isinstance(answer, Models):
            return answer.models
        raise DeadlineExceeded(f"no list of models within {timeout_s:g} s")

    @contextlib.contextmanager
    def _line(self) -> Iterator[AsyncConnection[FromModelServer]]:
        line = self._connect()
        try:
            yield line
        finally:
            line.close()

    def _connect(self) -> AsyncConnection[FromModelServer]:
        return AsyncConnection(self._context, self._address, _DECODER)

    def close(self) -> None:
        """Close all connections; safe to call twice."""
        self._context.destroy(linger=200)
