"""The interface of all APIs: a task from a body, an answer from transcripts."""

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from protocol.gateway import GatewaySettings
from protocol.messages import Status
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
    return head + b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


@dataclass
class Reply(ABC):
    """An answer in the format of one API: whole, or as the events of a stream.

    A stream may start before it is opened, while its model is being loaded.
    """

    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    choices: list[Choice] = field(default_factory=list, init=False)
    status: Status = field(init=False)

    streamed_refusals: ClassVar[frozenset[str]] = frozenset()
    """Codes of errors that are sent as stream events even if nothing was sent before."""

    def open(self, choices: list[Choice], status: Status) -> None:
        """Attach the choices and the stack's status once the model is loaded."""
        self.choices, self.status = choices, status

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the body of a non-streaming answer, once all choices have ended."""

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


async def merge(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the events of all sources as they come, each with the number of its source.

    The first failure ends all of them. All sources are closed on exit, also after an error.
    """
    waiting = {asyncio.ensure_future(anext(source)): n for n, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(sources[number]))] = number
                yield number, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()
