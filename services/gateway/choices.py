"""The choices of one answer (`n`): requests of their own that are told as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from protocol.errors import RuntimeFailure
from protocol.messages import Finished, Generate
from services.gateway.transcript import Transcript

T = TypeVar("T")


@dataclass
class Choice:
    """One of the answers to a request, as far as it has come."""

    index: int
    request: Generate
    transcript: Transcript
    finished: Finished | None = None

    @property
    def end(self) -> Finished:
        """How it ended; raises RuntimeFailure before that."""
        if self.finished is None:
            raise RuntimeFailure("the answer ended without its last message")
        return self.finished


def requests_of(generate: Generate, n: int) -> list[Generate]:
    """The request `n` times, each with a seed of its own: the first one's plus its index."""
    sampling = generate.sampling
    seeds = [(sampling.seed + index) % 2**63 for index in range(n)]
    return [replace(generate, sampling=replace(sampling, seed=seed)) for seed in seeds]


async def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """What all sources say, as it comes, each with the number of its source.

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
