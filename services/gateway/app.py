"""The routes, and one answer's way from the orchestrator to the client."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from protocol.client.async_client import AsyncClient
from protocol.decoding.grammar import check_grammar
from protocol.errors import SsdError
from protocol.messages import Finished, Generate, Status, Text
from protocol.settings import GatewaySettings
from services.gateway import parse
from services.gateway.auth import Guard, read_body
from services.gateway.errors import ApiError, to_api_error, unsupported
from services.gateway.metrics import Metrics
from services.gateway.responses import (
    ChatReply,
    Choice,
    CompletionReply,
    Reply,
    expand_choices,
    merge,
)
from services.gateway.schema import UNSET, ChatRequest, CompletionRequest
from services.gateway.stream import ClientLeft, EventStream, wait_for_disconnect, watch_events
from services.gateway.tool_format import ToolFormat, find_tool_format
from services.gateway.transcript import Transcript
from services.gateway.web import render_page

_log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 5.0
_STATUS_S = 5.0


class Gateway:
    """Answers HTTP requests by asking an orchestrator."""

    def __init__(self, settings: GatewaySettings, client: AsyncClient) -> None:
        self._settings = settings
        self._client = client
        self._metrics = Metrics()
        self._started = int(time.time())
        self._tool_format = (
            find_tool_format(Path(settings.model)) if settings.model else ToolFormat()
        )

    def app(self, key: str) -> ASGIApp:
        """The application, for strangers and friends."""
        settings = self._settings
        limit = settings.rate_limit
        middleware = [Middleware(Guard, key=key, hosts=settings.hosts, rate_limit=limit)]
        if settings.allowed_origins:
            # Outermost, so that a page may also read why it was refused.
            cors = Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
            middleware.insert(0, cors)
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/", self._page, methods=["GET"]),
                Route("/recent", self._recent, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._show_metrics, methods=["GET"]),
            ],
            middleware=middleware,
            exception_handlers={
                ApiError: _on_fault,
                SsdError: _on_error,
                HTTPException: _on_http,
                ClientLeft: _on_departure,
                Exception: _on_surprise,
            },
        )

    # ------------------------------------------------------------ answers

    async def _chat(self, request: Request) -> Response:
        body = await read_body(request, self._settings.max_body_bytes)
        asked = parse.decode_request(body, ChatRequest)
        return await self._answer(request, asked, parse.parse_chat(asked, self._settings.sampling))

    async def _completions(self, request: Request) -> Response:
        body = await read_body(request, self._settings.max_body_bytes)
        asked = parse.decode_request(body, CompletionRequest)
        generate = parse.parse_completion(asked, self._settings.sampling)
        return await self._answer(request, asked, generate)

    async def _answer(
        self, request: Request, asked: ChatRequest | CompletionRequest, generate: Generate
    ) -> Response:
        if (
            generate.sampling.logits_options is not None
            and generate.sampling.logits_options.grammar
        ):
            # A large schema may take a while, and others are being answered.
            await asyncio.to_thread(check_grammar, generate.sampling.logits_options.grammar)
        status = await self._client.status(_STATUS_S)
        self._check_models(asked, status)
        options = asked.stream_options
        if options and not asked.stream:
            raise unsupported("stream_options", "only with stream")
        kind = ChatReply if isinstance(asked, ChatRequest) else CompletionReply
        choices = [
            Choice(index, one, self._transcript(asked))
            for index, one in enumerate(expand_choices(generate, asked.n or 1))
        ]
        reply = kind(
            choices=choices,
            status=status,
            model=self._settings.names[0],
            include_usage=bool(options and options.include_usage),
            include_origins=bool(options and options.include_origins),
        )
        events = merge([self._client.generate(one.request) for one in choices])
        if not asked.stream:
            return await self._whole(request, events, reply)
        stream = EventStream(events, reply, self._metrics, _KEEP_ALIVE_S)
        await stream.begin(request.receive)
        return stream

    def _transcript(self, asked: ChatRequest | CompletionRequest) -> Transcript:
        # A call that a grammar constrains has the grammar's marks, not the model's.
        form = ToolFormat() if parse.requires_call(asked) else self._tool_format
        return Transcript(parse.list_functions(asked), form)

    async def _whole(
        self, request: Request, events: AsyncGenerator[tuple[int, Text | Finished]], reply: Reply
    ) -> Response:
        gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
        try:
            async with contextlib.aclosing(
                watch_events(events, gone, _KEEP_ALIVE_S)
            ) as heard_events:
                async for said in heard_events:
                    if said is not None:
                        self._take(reply.choices[said[0]], said[1])
        except (SsdError, ClientLeft) as error:
            self._metrics.failed("cancelled" if isinstance(error, ClientLeft) else "error")
            raise
        finally:
            gone.cancel()
        return JSONResponse(reply.whole())

    def _take(self, choice: Choice, event: Text | Finished) -> None:
        if isinstance(event, Text):
            choice.transcript.push(event)
            return
        choice.finished = event
        self._metrics.finished(event, choice.transcript.tokens, choice.request.mode)
        if event.reason == "cancelled":
            raise ApiError(503, "the request was cancelled", code="cancelled")

    def _check_models(self, asked: ChatRequest | CompletionRequest, status: Status) -> None:
        """This server has one pair; whoever wants another must hear of it."""
        names = self._settings.names
        if asked.model is not None and asked.model not in names:
            raise ApiError(
                404,
                f"there is no model {asked.model!r} here, only {names[0]!r}",
                code="model_not_found",
                param="model",
            )
        if asked.draft_model is UNSET or asked.draft_model is None:
            return
        drafter = next((s for s in status.services if s.role == "drafter"), None)
        here = {drafter.model, _last(drafter.model), drafter.backend} - {""} if drafter else set()
        if asked.draft_model not in here:
            raise ApiError(
                404,
                f"the drafter {asked.draft_model!r} is not running here; running: "
                f"{', '.join(sorted(here)) or 'none'}",
                code="model_not_found",
                param="draft_model",
            )

    # ------------------------------------------------------------ about the server

    async def _models(self, request: Request) -> Response:
        del request
        return JSONResponse({"object": "list", "data": [self._card(self._settings.names[0])]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._settings.names:
            raise ApiError(404, f"there is no model {name!r} here", code="model_not_found")
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "local"}

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
        render_page = self._metrics.page(await self._client.status(_STATUS_S))
        return Response(render_page, media_type="text/plain; version=0.0.4; charset=utf-8")


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


async def _on_fault(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)  # noqa: S101  # registered for Fault alone
    return error.response()


async def _on_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, SsdError)  # noqa: S101  # registered for SsdError alone
    return to_api_error(error).response()


async def _on_http(request: Request, error: Exception) -> Response:
    """Starlette's own: an unknown path, a method that a path does not have."""
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for it alone
    what = f"{request.method} {request.url.path}"
    known = error.status_code in (404, 405)
    message = f"there is no {what} here" if known else error.detail
    return ApiError(error.status_code, message, code="unknown_url" if known else None).response()


async def _on_surprise(request: Request, error: Exception) -> Response:
    """A defect of ours; the server logs its story."""
    del request
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal").response()


async def _on_departure(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    del request, error
    return Response(status_code=499)
