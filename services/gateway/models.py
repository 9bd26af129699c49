"""The models that a gateway offers, and their use by requests.

With a model server behind it, a model is asked for before each answer and released after it;
without one there is a single model that is always there.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from protocol.client.async_client import AsyncClient
from protocol.client.model_client import ModelClient, ModelUse
from protocol.gateway import GatewayModel, GatewaySettings
from protocol.messages import ModelStatus, Status
from protocol.process.closeable import Closeable
from services.gateway.errors import ApiError
from services.gateway.task import Task, TaskPlanner
from services.gateway.template import ModelText

STATUS_S = 4.0
"""Longest wait for an orchestrator's status, and for the list of models. Shorter than the silence
after which a stream begins, so that a stack that does not answer is still a status of HTTP."""

_FRESH_S = 0.1
"""How long a status is taken for the present one."""

Connect = Callable[[str], AsyncClient]
"""A client of the orchestrator at an address."""


class ServedModel(Closeable):
    """One model: its orchestrator, and what its folder says about requests and answers."""

    def __init__(self, told: GatewayModel, connect: Connect, max_draft_tokens: int) -> None:
        self.names = told.names
        self.sampling = told.sampling
        """What requests get that do not say otherwise."""
        self._max_draft_tokens = max_draft_tokens
        self.drafters = told.drafters
        self._folder = ""
        self._connect = connect
        self._address = told.clients_address
        self._client: AsyncClient | None = None
        self._asked: asyncio.Task[Status] | None = None
        """The question for the status that was asked last."""
        self._asked_at = 0.0
        """When it was answered."""
        self.read(told.folder)

    def read(self, folder: str) -> None:
        """Its files are in this folder; empty: not known yet."""
        if folder and folder == self._folder:
            return
        self._folder = folder
        self.planner = TaskPlanner(
            ModelText(Path(folder) if folder else None), max_draft_tokens=self._max_draft_tokens
        )

    @property
    def name(self) -> str:
        """As answers call it."""
        return self.names[0]

    @property
    def client(self) -> AsyncClient:
        """Of its orchestrator."""
        if self._client is None:
            self._client = self._connect(self._address)
        return self._client

    async def status(self) -> Status:
        """The status of its orchestrator; all who ask at the same time share one answer."""
        loop = asyncio.get_running_loop()
        if self._asked is None or loop.time() - self._asked_at > _FRESH_S:
            self._asked = asyncio.ensure_future(self.client.status(STATUS_S))
            self._asked.add_done_callback(self._on_status)
            self._asked_at = math.inf
        return await asyncio.shield(self._asked)

    def _on_status(self, asked: "asyncio.Task[Status]") -> None:
        """Keep an answer for a moment, and no failure."""
        self._asked_at = asyncio.get_running_loop().time()
        if asked.cancelled() or asked.exception() is not None:
            self._asked = None

    def check_drafter(self, wanted: str | None, status: Status) -> None:
        """Raises ApiError if a request wants a drafter that is not there."""
        if wanted in (None, _MLX_LM_DEFAULT) or wanted in self.drafters:
            return
        model = status.drafter.model if status.drafter is not None else ""
        here = {model, _last(model), status.draft_backend or ""} - {""}
        if wanted in here:
            return
        known = sorted(here | set(self.drafters))
        raise ApiError(
            404,
            f"the drafter {wanted!r} is not running here; running: {', '.join(known) or 'none'}",
            code="model_not_found",
            param="draft_model",
        )

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._client is not None:
            self._client.close()
            self._client = None


class Lease(Closeable):
    """A model that a request uses until this is closed."""

    def __init__(self, model: ServedModel, use: ModelUse | None) -> None:
        self.model = model
        self._use = use

    @property
    def is_ready(self) -> bool:
        """Whether the model is there without being asked for."""
        return self._use is None

    async def await_ready(self, timeout_s: float) -> None:
        """Return when the model is loaded; errors as for `ModelUse.await_ready`."""
        if self._use is not None:
            ready = await self._use.await_ready(timeout_s)
            self.model.read(ready.folder)
            self.model.sampling = ready.sampling

    def close(self) -> None:
        """The model is not needed any more; safe to call twice."""
        if self._use is not None:
            self._use.close()


class ServedModels(Closeable):
    """All models of a gateway."""

    def __init__(self, settings: GatewaySettings, connect: Connect) -> None:
        most = settings.max_draft_tokens
        self._models = [ServedModel(told, connect, most) for told in settings.models]
        self._by_name = {name: model for model in self._models for name in model.names}
        self._server = ModelClient(settings.model_server) if settings.model_server else None

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def find(self, name: str | None) -> ServedModel:
        """The model of this name, the first without one; raises ApiError if there is none."""
        if name is None or name == _MLX_LM_DEFAULT:
            return self._models[0]
        model = self._by_name.get(name)
        if model is None:
            known = ", ".join(repr(model.name) for model in self._models)
            raise ApiError(
                404,
                f"there is no model {name!r} here, only {known}",
                code="model_not_found",
                param="model",
            )
        return model

    def lease(self, task: Task) -> Lease:
        """The model that a task wants; it is to be awaited. Raises ApiError if there is none."""
        model = self.find(task.model)
        if self._server is None:
            return Lease(model, None)
        drafter = task.drafter if task.drafter in model.drafters else None
        return Lease(model, self._server.use(model.name, drafter or ""))

    async def describe(self) -> dict[str, ModelStatus]:
        """By name, the states of the models; empty without a model server: it is loaded."""
        if self._server is None:
            return {}
        return {one.name: one for one in await self._server.list_models(STATUS_S)}

    async def statuses(self) -> list[Status]:
        """Of the orchestrators of all models that are loaded."""
        states = await self.describe()
        loaded = [
            model
            for model in self._models
            if not states or (model.name in states and states[model.name].state == "loaded")
        ]
        return [await model.status() for model in loaded]

    def close(self) -> None:
        """Close everything; safe to call twice."""
        for model in self._models:
            model.close()
        if self._server is not None:
            self._server.close()


_MLX_LM_DEFAULT = "default_model"
"""What clients of mlx-lm name the model, or drafter, that the server was started with."""


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
