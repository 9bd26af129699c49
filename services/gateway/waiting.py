"""Waiting for an answer and for the client's end at the same time."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed its connection."""


async def departure(receive: Receive) -> None:
    """Return when the client is gone; everything of the request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def heard(
    events: AsyncGenerator[T], gone: "asyncio.Task[None]", silence_s: float
) -> AsyncGenerator[T | None]:
    """The events as they come, and None after every `silence_s` seconds without one.

    However it ends, the source has been closed then, which cancels its request.

    Raises:
        ClientLeft: the client went away.
    """
    following: asyncio.Task[T] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(events))
            while not following.done():
                await asyncio.wait(
                    {following, gone}, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
                )
                if gone.done():
                    raise ClientLeft
                if not following.done():
                    yield None
            try:
                event = following.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await events.aclose()
