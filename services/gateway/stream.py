"""Server-sent events: one answer, chunk by chunk."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protocol.errors import SsdError
from protocol.messages import Finished, Text
from services.gateway.dialects.base import Reply
from services.gateway.errors import ApiError, ClientLeft, to_api_error
from services.gateway.request_log import RequestLog

T = TypeVar("T")


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected; the whole request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def watch_events(
    events: AsyncGenerator[T], gone: "asyncio.Task[None]", silence_s: float
) -> AsyncGenerator[T | None]:
    """Yield the events as they come, and None after every `silence_s` seconds without one.

    The source is closed on exit, also after an error, which cancels its request.

    Raises:
        ClientLeft: the client disconnected.
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


class EventStream(Response):
    """The streaming response; call `begin` first, so that a refusal can still be an error."""

    def __init__(
        self,
        events: AsyncGenerator[tuple[int, Text | Finished]],
        reply: Reply,
        log: RequestLog,
        *,
        silence_s: float,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
        )
        del self.headers["content-length"]  # not known yet
        self._source = events
        self._reply = reply
        self._log = log
        self._silence_s = silence_s
        self._gone: asyncio.Task[None] | None = None
        self._events: AsyncGenerator[tuple[int, Text | Finished] | None] | None = None
        self._first: tuple[int, Text | Finished] | None = None
        self._refusal: ApiError | None = None

    async def begin(self, receive: Receive) -> None:
        """Wait for the first event, or for the time after which a client needs a keep-alive.

        Raises:
            SsdError, ApiError: the request was refused.
            ClientLeft: the client disconnected.
        """
        self._gone = asyncio.ensure_future(wait_for_disconnect(receive))
        self._events = watch_events(self._source, self._gone, self._silence_s)
        try:
            self._first = await anext(self._events)
        except (SsdError, ApiError) as error:
            self._gone.cancel()
            self._refusal = to_api_error(error)
            self._log.on_failure(self._refusal)
            if self._refusal.code not in self._reply.streamed_refusals:
                raise
        except BaseException as error:
            self._gone.cancel()
            if isinstance(error, ClientLeft):
                self._log.on_departure()
            else:
                self._log.on_failure(ApiError(500, f"internal error: {type(error).__name__}"))
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; ends early if the client disconnects."""
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with contextlib.aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientLeft:
            self._log.on_departure()
        finally:
            if self._gone is not None:
                self._gone.cancel()

    async def _chunks(self) -> AsyncGenerator[bytes]:
        assert self._events is not None  # noqa: S101  # `begin` was called
        for chunk in self._reply.start():
            yield chunk
        if self._refusal is not None:
            for chunk in self._reply.fail(self._refusal):
                yield chunk
            return
        try:
            for chunk in self._render(self._first):
                yield chunk
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    for chunk in self._render(event):
                        yield chunk
            ending = self._reply.end()
        except (SsdError, ApiError) as error:
            failure = to_api_error(error)
            self._log.on_failure(failure)
            ending = self._reply.fail(failure)
        for chunk in ending:
            yield chunk

    def _comments(self) -> list[bytes]:
        """Return the progress as comments for human readers; clients ignore them."""
        if not self._reply.choices:
            return [b": the model is being loaded\n\n"]
        waiting = [
            choice.progress for choice in self._reply.choices if not choice.transcript.tokens
        ]
        return [
            f": prefill {one.computed} of {one.prompt_tokens} tokens\n\n".encode()
            for one in waiting
            if one is not None
        ]

    def _render(self, numbered: tuple[int, Text | Finished] | None) -> list[bytes]:
        if numbered is None:
            return [*self._comments(), self._reply.keep_alive()]
        choice, event = self._reply.choices[numbered[0]], numbered[1]
        if isinstance(event, Text):
            return self._reply.add(choice, choice.transcript.push(event))
        choice.finished = event
        rest = choice.transcript.end(cut_off=choice.is_cut_off)
        self._log.on_answer(choice, event)
        return self._reply.finish(choice, rest)
