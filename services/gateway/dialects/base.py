"""The interface of all APIs: a task from a body, an answer from transcripts."""

import asyncio
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from protocol.gateway import GatewaySettings
from services.gateway.errors import ApiError
from services.gateway.task import Choice, Task
from services.gateway.transcript import Piece

T = TypeVar("T")
KEEP_ALIVE = b": keep-alive\n\n"


class Reading(NamedTuple):
    """A parsed request: the task, and the reply's factory."""

    task: Task
    make_reply: "Callable[[str], Reply]"
    """Creates the reply from the model's name."""


Reader = Callable[[bytes, GatewaySettings], Reading]


def encode_event(body: dict[str, Any], name: str = "") -> bytes:
    """Encode one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


@dataclass
class Reply(ABC):
    """An answer in the format of one API: whole, or as the events of a stream.

    A stream may start before it is opened, while its model is being loaded.
    """

    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    choices: list[Choice] = field(default_factory=list, init=False)

    streamed_refusals: ClassVar[frozenset[str]] = frozenset()
    """Codes of errors that are sent as stream events even if nothing was sent before."""

    def open(self, choices: list[Choice]) -> None:
        """Attach the choices once the model is loaded."""
        self.choices = choices

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the body of a non-streaming answer, once all choices have ended."""

    def collect(self, choice: Choice, piece: Piece) -> None:
        """Keep what a non-streaming answer shows of a piece besides its transcript."""
        del choice, piece

    def start(self) -> list[bytes]:
        """Return the events before the first token, also before the reply is opened."""
        return []

    @abstractmethod
    def add(self, choice: Choice, piece: Piece) -> list[bytes]:
        """Return the events of a piece."""

    @abstractmethod
    def finish(self, choice: Choice, rest: Piece) -> list[bytes]:
        """Return the events after a choice's last token; `rest` was held back until then."""

    def end(self) -> list[bytes]:
        """Return the last events of the stream."""
        return []

    def keep_alive(self) -> bytes:
        """Return a keep-alive event for silent phases, such as a long prefill."""
        return KEEP_ALIVE

    @abstractmethod
    def fail(self, error: ApiError) -> list[bytes]:
        """Return the events that end a broken stream."""


async def merge(
    sources: Sequence[AsyncGenerator[T]], at_once: int
) -> AsyncGenerator[tuple[int, T]]:
    """Yield the events of all sources as they come, each with the number of its source.

    The first failure ends all of them. All sources are closed on exit, also after an error.

    Args:
        sources: not started yet.
        at_once: the number of sources that run at the same time.
    """
    numbered = iter(enumerate(sources))
    events: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(1)
    """None: nothing is left to one of the workers."""

    async def work() -> None:
        try:
            for number, source in numbered:
                async with contextlib.aclosing(source):
                    async for event in source:
                        await events.put((number, event))
        except Exception as error:  # noqa: BLE001  # raised where the events are read
            await events.put(error)
        await events.put(None)

    workers = [asyncio.ensure_future(work()) for _ in range(min(at_once, len(sources)))]
    try:
        working = len(workers)
        while working:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                working -= 1
            else:
                yield event
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
