"""The routes, and one answer's way from the orchestrator to the client."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

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
from protocol.decoding.grammar_check import GrammarChecker
from protocol.errors import SsdError, UsageError
from protocol.messages import Finished, Status, Text
from protocol.settings import GatewaySettings
from services.gateway.auth import Guard
from services.gateway.body import read_body, to_header
from services.gateway.dialects.base import Reader, Reading, Reply, merge
from services.gateway.dialects.chat_reply import read_chat
from services.gateway.dialects.completions import read_completion
from services.gateway.dialects.conversations import Conversations
from services.gateway.dialects.messages import parse_count
from services.gateway.dialects.messages_reply import read_messages
from services.gateway.dialects.responses_reply import read_responses
from services.gateway.errors import ApiError, ClientLeft, find_prompt_length, to_api_error
from services.gateway.generation import generate
from services.gateway.metrics import Metrics
from services.gateway.stream import EventStream, wait_for_disconnect, watch_events
from services.gateway.task import Choice, Task, TaskPlanner
from services.gateway.template import ModelText
from services.gateway.web import render_page

_KEEP_ALIVE_S = 5.0
_STATUS_S = 5.0

_APIS: tuple[tuple[str, Reader], ...] = (
    ("/v1/chat/completions", read_chat),
    ("/v1/completions", read_completion),
    ("/v1/messages", read_messages),
)


class Gateway:
    """Answers HTTP requests by asking an orchestrator."""

    def __init__(self, settings: GatewaySettings, client: AsyncClient) -> None:
        self._settings = settings
        self._client = client
        self._metrics = Metrics()
        self._started = int(time.time())
        self._planner = TaskPlanner(ModelText(Path(settings.model) if settings.model else None))
        self._grammars = GrammarChecker(settings.model)
        self._conversations = Conversations()

    def app(self, key: str) -> ASGIApp:
        """The application, for strangers and friends."""
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
            # Outermost, so that a page may also read why it was refused.
            cors = Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[_IGNORED],
            )
            middleware.insert(0, cors)
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
        """The application's life; the process that checks grammars ends with it."""
        del application
        try:
            yield
        finally:
            self._grammars.close()

    def _routes(self) -> list[Route]:
        return [
            *(Route(path, self._answer_with(read), methods=["POST"]) for path, read in _APIS),
            Route("/v1/responses", self._answer_with(self._read_responses), methods=["POST"]),
            Route("/v1/responses/{name}", self._response, methods=["GET", "DELETE"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
            *(Route(path, _refuse_api, methods=["GET", "POST"]) for path in _REFUSED),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/", self._page, methods=["GET"]),
            Route("/recent", self._recent, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._show_metrics, methods=["GET"]),
        ]

    # ------------------------------------------------------------ answers

    def _answer_with(self, read: Reader) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of an API."""

        async def answer(request: Request) -> Response:
            body = await read_body(request, self._settings.max_body_bytes)
            reading = read(body, self._settings)
            if request.headers.get("x-priority", "").lower() == "background":
                task = dataclasses.replace(reading.task, is_background=True)
                reading = reading._replace(task=task)
            return await self._answer(request, reading)

        return answer

    def _read_responses(self, body: bytes, settings: GatewaySettings) -> Reading:
        return read_responses(body, settings, self._conversations)

    async def _response(self, request: Request) -> Response:
        """A response that was given before."""
        name = request.path_params["name"]
        body = self._conversations.body(name)
        if body is None:
            raise ApiError(404, f"there is no response {name!r} here (any more)", code="not_found")
        if request.method == "GET":
            return JSONResponse(body)
        self._conversations.forget(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _count_tokens(self, request: Request) -> Response:
        """Anthropic's API to count a prompt's tokens."""
        body = await read_body(request, self._settings.max_body_bytes)
        task = parse_count(body, strict=self._settings.strict)
        question = replace(self._planner.plan(task)[0].request, count_only=True)
        status = await self._client.status(_STATUS_S)
        self._check_models(task, status)
        try:
            async with contextlib.aclosing(self._client.generate(question)) as events:
                counts = [e.prompt_tokens async for e in events if isinstance(e, Finished)]
        except UsageError as error:
            # A prompt that is too long is counted too.
            counts = [count] if (count := find_prompt_length(str(error))) else []
            if not counts:
                raise
        return JSONResponse({"input_tokens": counts[0]})

    async def _answer(self, request: Request, reading: Reading) -> Response:
        task = reading.task
        choices = self._planner.plan(task)
        options = choices[0].request.sampling.logits_options
        if options is not None and options.grammar:
            await asyncio.to_thread(self._grammars.check, options.grammar)
        status = await self._client.status(_STATUS_S)
        self._check_models(task, status)
        reply = reading.make_reply(choices, status, self._settings.names[0])
        headers = {_IGNORED: to_header(task.unknown)} if task.unknown else {}
        events = merge([generate(self._client, choice) for choice in choices])
        if not task.stream:
            return await self._whole(request, events, reply, headers)
        stream = EventStream(events, reply, self._metrics, silence_s=_KEEP_ALIVE_S, headers=headers)
        await stream.begin(request.receive)
        return stream

    async def _whole(
        self,
        request: Request,
        events: AsyncGenerator[tuple[int, Text | Finished]],
        reply: Reply,
        headers: dict[str, str],
    ) -> Response:
        gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
        try:
            async with contextlib.aclosing(watch_events(events, gone, _KEEP_ALIVE_S)) as watched:
                async for numbered in watched:
                    if numbered is not None:
                        self._take(reply.choices[numbered[0]], numbered[1])
        except (SsdError, ClientLeft) as error:
            self._metrics.count_failure("cancelled" if isinstance(error, ClientLeft) else "error")
            raise
        finally:
            gone.cancel()
        for choice in reply.choices:
            choice.transcript.end(cut_off=choice.is_cut_off)
        return JSONResponse(reply.whole(), headers=headers)

    def _take(self, choice: Choice, event: Text | Finished) -> None:
        if isinstance(event, Text):
            choice.transcript.push(event)
            return
        choice.finished = event
        self._metrics.count_answer(event, choice.transcript.tokens, choice.request.mode)
        if event.reason == "cancelled":
            raise ApiError(503, "the request was cancelled", code="cancelled")

    def _check_models(self, task: Task, status: Status) -> None:
        """This server has one pair; a client that wants another is not left in the dark."""
        names = self._settings.names
        if task.model is not None and task.model not in names:
            raise ApiError(
                404,
                f"there is no model {task.model!r} here, only {names[0]!r}",
                code="model_not_found",
                param="model",
            )
        if task.drafter is None:
            return
        drafter = next((s for s in status.services if s.role == "drafter"), None)
        here = {drafter.model, _last(drafter.model), drafter.backend} - {""} if drafter else set()
        if task.drafter not in here:
            raise ApiError(
                404,
                f"the drafter {task.drafter!r} is not running here; running: "
                f"{', '.join(sorted(here)) or 'none'}",
                code="model_not_found",
                param="draft_model",
            )

    # ------------------------------------------------------------ about the server

    async def _models(self, request: Request) -> Response:
        del request
        card = self._card(self._settings.names[0])
        return JSONResponse(
            {
                "object": "list",
                "data": [card],
                # As Anthropic's clients read it.
                "has_more": False,
                "first_id": card["id"],
                "last_id": card["id"],
            }
        )

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._settings.names:
            raise ApiError(404, f"there is no model {name!r} here", code="model_not_found")
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "local",
            "type": "model",
            "display_name": name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
        }

    async def _health(self, request: Request) -> Response:
        status = await self._client.status(_STATUS_S)
        roles = {service.role for service in status.services}
        healthy = "verifier" in roles
        state = "ok" if "drafter" in roles else "no drafter: decoding plainly"
        body: dict[str, Any] = {"status": state if healthy else "no verifier"}
        if request.state.trusted:
            body["stack"] = msgspec.to_builtins(status)
        return JSONResponse(body, status_code=200 if healthy else 503)

    async def _page(self, request: Request) -> Response:
        del request
        return render_page()

    async def _recent(self, request: Request) -> Response:
        """For the page: what the last answers were like."""
        del request
        return JSONResponse({"answers": list(self._metrics.recent)})

    async def _show_metrics(self, request: Request) -> Response:
        del request
        page = self._metrics.page(await self._client.status(_STATUS_S))
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


_IGNORED = "X-Ignored-Fields"

_REFUSED = {
    "/v1/embeddings": "embeddings are not computed here: the models served only generate text",
    "/v1/batches": "there are no batches: send the requests themselves, several at once",
    "/v1/files": "there are no files: send texts in the requests themselves",
    "/v1/messages/batches": "there are no batches: send the requests themselves, several at once",
}


async def _refuse_api(request: Request) -> Response:
    """An API that clients may look for."""
    raise ApiError(404, _REFUSED[request.url.path], code="unknown_url")


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101  # registered for it alone
    return error.response(request.url.path)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SsdError)  # noqa: S101  # registered for SsdError alone
    return to_api_error(error).response(request.url.path)


async def _on_http(request: Request, error: Exception) -> Response:
    """Starlette's own: an unknown path, a method that a path does not have."""
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for it alone
    what = f"{request.method} {request.url.path}"
    known = error.status_code in (404, 405)
    message = f"there is no {what} here" if known else error.detail
    answer = ApiError(error.status_code, message, code="unknown_url" if known else None)
    return answer.response(request.url.path)


async def _on_surprise(request: Request, error: Exception) -> Response:
    """A defect of ours; the server logs the traceback."""
    defect = ApiError(500, f"internal error: {type(error).__name__}", code="internal")
    return defect.response(request.url.path)


async def _on_departure(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    del request, error
    return Response(status_code=499)
