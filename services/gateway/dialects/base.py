"""What the APIs have in common: a task from a body, an answer from transcripts."""

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
    """A request that was read: what is asked for, and who words the answer."""

    task: Task
    make_reply: "Callable[[str], Reply]"
    """From the model's name."""


Reader = Callable[[bytes, GatewaySettings], Reading]


def encode_event(body: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


@dataclass
class Reply(ABC):
    """An answer in the words of one API: whole, or as the events of a stream.

    A stream may start before it is opened, while its model is being loaded.
    """

    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    choices: list[Choice] = field(default_factory=list, init=False)
    status: Status = field(init=False)

    streamed_refusals: ClassVar[frozenset[str]] = frozenset()
    """Codes of errors that are events of a stream even if nothing was sent before."""

    def open(self, choices: list[Choice], status: Status) -> None:
        """The model is there: these are the answers that it gives, and this its stack's status."""
        self.choices, self.status = choices, status

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream, once all choices have ended."""

    def start(self) -> list[bytes]:
        """The events before the first token, also before the reply is opened."""
        return []

    @abstractmethod
    def add(self, choice: Choice, piece: Piece) -> list[bytes]:
        """The events of a piece."""

    @abstractmethod
    def finish(self, choice: Choice, rest: Piece) -> list[bytes]:
        """The events after a choice's last token; `rest` is what was held back until then."""

    def end(self) -> list[bytes]:
        """The events at the very end."""
        return []

    def keep_alive(self) -> bytes:
        """What is sent while there is nothing to say, as during a long prefill."""
        return KEEP_ALIVE

    @abstractmethod
    def fail(self, error: ApiError) -> list[bytes]:
        """The events that end a broken stream."""


async def merge(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """The events of all sources as they come, each with the number of its source.

    The first failure ends all of them. However it ends, all sources have been closed then.
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
