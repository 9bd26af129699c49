"""The routes, and how one answer travels from the orchestrator to the client."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from protocol.client.async_client import AsyncClient
from protocol.errors import SsdError, UsageError
from protocol.gateway import GatewaySettings
from protocol.messages import Finished, Text
from protocol.process.step_times import StepTimes
from services.gateway.auth import Guard, name_client
from services.gateway.body import read_body, refuse_unknown, to_header
from services.gateway.dialects.base import Reader, Reading, Reply
from services.gateway.dialects.chat_reply import read_chat
from services.gateway.errors import ApiError, ClientLeft, find_prompt_length, to_api_error
from services.gateway.generation import generate_all, share_prompts
from services.gateway.http.large_bodies import LARGE_BYTES, LargeBodies
from services.gateway.metrics import Metrics
from services.gateway.models import Connect, Lease, ServedModel, ServedModels
from services.gateway.paths import Paths
from services.gateway.request_log import RequestLog
from services.gateway.server_info import ServerInfo
from services.gateway.stream import EventStream, wait_for_disconnect, watch_events
from services.gateway.task import Choice, Task

if TYPE_CHECKING:
    from services.gateway.dialects.conversations import Conversations

_KEEP_ALIVE_S = 5.0


# All APIs but the chat's are loaded with their first request.


def _read_completion(body: bytes, settings: GatewaySettings) -> Reading:
    from services.gateway.dialects.completions import read_completion  # noqa: PLC0415

    return read_completion(body, settings)


def _read_messages(body: bytes, settings: GatewaySettings) -> Reading:
    from services.gateway.dialects.messages_reply import read_messages  # noqa: PLC0415

    return read_messages(body, settings)


_APIS: tuple[tuple[str, Reader], ...] = (
    ("/v1/chat/completions", read_chat),
    ("/v1/completions", _read_completion),
    ("/v1/messages", _read_messages),
)


class Gateway:
    """Answers HTTP requests by asking orchestrators.

    Args:
        settings: the gateway's.
        connect: creates the client of an orchestrator.
        steps: step times of its event loop.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        connect: Connect = AsyncClient,
        *,
        steps: StepTimes | None = None,
    ) -> None:
        self._settings = settings
        self._models = ServedModels(settings, connect)
        self._metrics = Metrics(steps)
        self._bodies = LargeBodies()

    def app(self, key: str) -> ASGIApp:
        """Return the application, which requires `key`."""
        settings = self._settings
        middleware = [
            Middleware(
                Guard,
                key=key,
                hosts=settings.hosts,
                origins=settings.allowed_origins,
                rate_limit=settings.rate_limit,
            )
        ]
        if settings.allowed_origins:
            # Outermost, so that a page can also read why it was refused.
            cors = Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[_IGNORED],
            )
            middleware.insert(0, cors)
        middleware.insert(0, Middleware(Paths))
        return Starlette(
            routes=self._routes(),
            middleware=middleware,
            lifespan=self._run,
            exception_handlers={
                ApiError: _on_api_error,
                SsdError: _on_error,
                HTTPException: _on_http,
                ClientLeft: _on_departure,
                Exception: _on_surprise,
            },
        )

    @contextlib.asynccontextmanager
    async def _run(self, application: Starlette) -> AsyncIterator[None]:
        """Run for the application's lifetime; connections and helper processes end with it."""
        del application
        with self._models, self._bodies:
            yield

    def _routes(self) -> list[Route]:
        return [
            *(Route(path, self._answer_with(read), methods=["POST"]) for path, read in _APIS),
            Route("/v1/responses", self._answer_with(self._read_responses), methods=["POST"]),
            Route("/v1/responses/{name}", self._response, methods=["GET", "DELETE"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
            *(Route(path, _refuse_api, methods=["GET", "POST"]) for path in _REFUSED),
            *ServerInfo(self._models, self._metrics).routes(),
        ]

    # ------------------------------------------------------------ answers

    def _answer_with(self, read: Reader) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of an API."""

        async def answer(request: Request) -> Response:
            log = RequestLog(self._metrics, f"{request.method} {request.url.path}")
            try:
                return await self._read_and_answer(request, read, log)
            except (ApiError, SsdError) as error:
                log.on_refusal(to_api_error(error) if isinstance(error, SsdError) else error)
                raise

        return answer

    async def _read_and_answer(self, request: Request, read: Reader, log: RequestLog) -> Response:
        body = await read_body(request, self._settings.max_body_bytes)
        reading = await self._bodies.read(len(body), read, body, self._settings)
        if self._settings.strict:
            refuse_unknown(reading.task.unknown)
        lease = self._models.lease(reading.task)
        reply = reading.make_reply(lease.model.name)
        log.name = reply.name

        async def plan() -> Task:
            return await self._adapt(request, read, body, reading.task, lease.model)

        events = self._generate(lease, plan, reply)
        headers = {_IGNORED: to_header(unknown)} if (unknown := reading.task.unknown) else {}
        try:
            if not reading.task.stream:
                return await self._whole(request, events, reply, log, headers)
            stream = EventStream(events, reply, log, silence_s=_KEEP_ALIVE_S, headers=headers)
            await stream.begin(request.receive)
        except BaseException:
            lease.close()
            raise
        return stream

    async def _adapt(
        self, request: Request, read: Reader, body: bytes, task: Task, model: ServedModel
    ) -> Task:
        """Adapt the task to a model whose own defaults are known by now."""
        if model.sampling != self._settings.sampling:
            settings = replace(self._settings, sampling=model.sampling)
            task = (await self._bodies.read(len(body), read, body, settings)).task
        is_background = request.headers.get("x-priority", "").lower() == "background"
        is_large = len(body) * task.choices >= LARGE_BYTES
        return dataclasses.replace(
            task, is_background=is_background, client=name_client(request), is_large=is_large
        )

    async def _generate(
        self, lease: Lease, plan: Callable[[], Awaitable[Task]], reply: Reply
    ) -> AsyncGenerator[tuple[int, Text | Finished]]:
        """Yield the events of all choices once the model is loaded.

        The model is released at the end, also after an error.
        """
        with lease:
            await lease.await_ready(self._settings.load_timeout_s)
            task, model = await plan(), lease.model
            choices = model.planner.plan(task)
            if task.is_large and task.choices > 1:
                await share_prompts(model.client, choices, task.choices)
            model.check_drafter(task.drafter, await model.status())
            reply.open(choices)
            async with contextlib.aclosing(generate_all(model.client, choices)) as events:
                async for event in events:
                    yield event

    @cached_property
    def _conversations(self) -> "Conversations":
        from services.gateway.dialects.conversations import Conversations  # noqa: PLC0415

        return Conversations()

    def _read_responses(self, body: bytes, settings: GatewaySettings) -> Reading:
        from services.gateway.dialects.responses_reply import read_responses  # noqa: PLC0415

        return read_responses(body, settings, self._conversations)

    async def _response(self, request: Request) -> Response:
        """Return an earlier response."""
        name = request.path_params["name"]
        body = self._conversations.body(name)
        if body is None:
            raise ApiError(404, f"there is no response {name!r} here (any more)", code="not_found")
        if request.method == "GET":
            return JSONResponse(body)
        self._conversations.forget(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _count_tokens(self, request: Request) -> Response:
        """Count a prompt's tokens for Anthropic's API."""
        from services.gateway.dialects.messages import parse_count  # noqa: PLC0415

        body = await read_body(request, self._settings.max_body_bytes)
        strict = self._settings.strict
        task = await self._bodies.read(len(body), parse_count, body, strict=strict)
        if self._settings.strict:
            refuse_unknown(task.unknown)
        with self._models.lease(task) as lease:
            await self._await_ready(request, lease)
            model = lease.model
            question = replace(model.planner.plan(task)[0].request, count_only=True)
            try:
                async with contextlib.aclosing(model.client.generate(question)) as events:
                    counts = [e.prompt_tokens async for e in events if isinstance(e, Finished)]
            except UsageError as error:
                # A prompt that is too long is counted as well.
                counts = [count] if (count := find_prompt_length(str(error))) else []
                if not counts:
                    raise
        return JSONResponse({"input_tokens": counts[0]})

    async def _await_ready(self, request: Request, lease: Lease) -> None:
        """Wait for the model; raises ClientLeft if the client disconnects meanwhile."""
        if lease.is_ready:
            return
        gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
        ready = asyncio.ensure_future(lease.await_ready(self._settings.load_timeout_s))
        try:
            await asyncio.wait({gone, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise ClientLeft
            ready.result()
        finally:
            gone.cancel()
            ready.cancel()

    async def _whole(
        self,
        request: Request,
        events: AsyncGenerator[tuple[int, Text | Finished]],
        reply: Reply,
        log: RequestLog,
        headers: dict[str, str],
    ) -> Response:
        gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
        try:
            async with contextlib.aclosing(watch_events(events, gone, _KEEP_ALIVE_S)) as watched:
                async for numbered in watched:
                    if numbered is not None:
                        _take(reply, reply.choices[numbered[0]], numbered[1], log)
        except SsdError as error:
            log.on_failure(to_api_error(error))
            raise
        except ClientLeft:
            log.on_departure()
            raise
        finally:
            gone.cancel()
        for choice in reply.choices:
            choice.transcript.end(cut_off=choice.is_cut_off)
        body = msgspec.json.encode(reply.whole())
        return Response(body, media_type="application/json", headers=headers)


def _take(reply: Reply, choice: Choice, event: Text | Finished, log: RequestLog) -> None:
    if isinstance(event, Text):
        reply.collect(choice, choice.transcript.push(event))
        return
    choice.finished = event
    log.on_answer(choice, event)
    if event.reason == "cancelled":
        raise ApiError(503, "the request was cancelled", code="cancelled")


_IGNORED = "X-Ignored-Fields"

_OLLAMA = "Ollama's own API is not spoken here: use OpenAI's, below /v1"
_REFUSED = {
    "/completion": "llama.cpp's own API is not spoken here: use /v1/completions",
    "/infill": "llama.cpp's own API is not spoken here: use /v1/completions with a suffix",
    "/api/chat": _OLLAMA,
    "/api/generate": _OLLAMA,
    "/api/tags": _OLLAMA,
    "/v1/embeddings": "embeddings are not computed here: the models served only generate text",
    "/v1/batches": "there are no batches: send the requests themselves, several at once",
    "/v1/files": "there are no files: send texts in the requests themselves",
    "/v1/messages/batches": "there are no batches: send the requests themselves, several at once",
}


async def _refuse_api(request: Request) -> Response:
    """Refuse an API that clients may probe for."""
    raise ApiError(404, _REFUSED[request.url.path], code="unknown_url")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101  # registered for it alone
    return error.response(request.url.path)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SsdError)  # noqa: S101  # registered for SsdError alone
    return to_api_error(error).response(request.url.path)


async def _on_http(request: Request, error: Exception) -> Response:
    """Handle Starlette's own errors: an unknown path, a method that a path does not have."""
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for it alone
    what = f"{request.method} {request.url.path}"
    known = error.status_code in (404, 405)
    message = f"there is no {what} here" if known else error.detail
    answer = ApiError(error.status_code, message, code="unknown_url" if known else None)
    return answer.response(request.url.path)


async def _on_surprise(request: Request, error: Exception) -> Response:
    """Report an internal error; the server logs the traceback."""
    defect = ApiError(500, f"internal error: {type(error).__name__}", code="internal")
    return defect.response(request.url.path)


async def _on_departure(request: Request, error: Exception) -> Response:
    """Return an empty response, since the client has disconnected."""
    del request, error
    return Response(status_code=499)
