"""Endpoints about the gateway itself: models, health, metrics, and the page."""

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protocol.messages import ModelStatus
from services.gateway.metrics import Metrics
from services.gateway.models import ServedModels


class ServerInfo:
    """The endpoints that answer no prompt.

    Args:
        models: those that are offered.
        metrics: figures of all answers.
    """

    def __init__(self, models: ServedModels, metrics: Metrics) -> None:
        self._models = models
        self._metrics = metrics
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        """Return their routes."""
        return [
            Route("/v1/models", self._list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._show_model, methods=["GET"]),
            Route("/", self._page, methods=["GET"]),
            Route("/recent", self._recent, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._show_metrics, methods=["GET"]),
        ]

    async def _list_models(self, request: Request) -> Response:
        del request
        states = await self._models.describe()
        cards = [self._card(model.name, states.get(model.name)) for model in self._models]
        return JSONResponse(
            {
                "object": "list",
                "data": cards,
                # Fields for Anthropic's clients.
                "has_more": False,
                "first_id": cards[0]["id"],
                "last_id": cards[-1]["id"],
            }
        )

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        states = await self._models.describe()
        return JSONResponse(self._card(name, states.get(self._models.find(name).name)))

    def _card(self, name: str, state: ModelStatus | None) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "local",
            "type": "model",
            "display_name": name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            "state": state.state if state is not None else "loaded",
        }
        if state is not None:
            card["memory_bytes"] = state.memory_bytes
            card |= {"note": state.note} if state.note else {}
        return card

    async def _health(self, request: Request) -> Response:
        states = await self._models.describe()
        if states:
            failed = [one.name for one in states.values() if one.state == "failed"]
            models: dict[str, Any] = {"status": f"failed: {', '.join(failed)}" if failed else "ok"}
            if request.state.trusted:
                stacks = await self._models.statuses()
                models["models"] = msgspec.to_builtins(list(states.values()))
                models["stack"] = msgspec.to_builtins(stacks[0]) if stacks else None
            return JSONResponse(models)
        [status] = await self._models.statuses()
        roles = {service.role for service in status.services}
        healthy = "verifier" in roles
        state = "ok" if status.draft_backend else "no drafter: decoding plainly"
        body: dict[str, Any] = {"status": state if healthy else "no verifier"}
        if request.state.trusted:
            body["stack"] = msgspec.to_builtins(status)
        return JSONResponse(body, status_code=200 if healthy else 503)

    async def _page(self, request: Request) -> Response:
        del request
        from services.gateway.web import render_page  # noqa: PLC0415  # read when it is visited

        return render_page()

    async def _recent(self, request: Request) -> Response:
        """Return the figures of the last answers, for the page."""
        del request
        return JSONResponse({"answers": list(self._metrics.recent)})

    async def _show_metrics(self, request: Request) -> Response:
        del request
        page = self._metrics.page(await self._models.statuses())
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")
