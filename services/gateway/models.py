"""The models that a gateway offers, and their use by requests.

With a model server, a model is requested before each answer and released after it; otherwise there
is a single model that is always loaded.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.client.async_client import AsyncClient
from protocol.gateway import GatewayModel, GatewaySettings
from protocol.messages import ModelStatus, Status
from protocol.process.closeable import Closeable
from services.gateway.errors import ApiError
from services.gateway.task import Task, TaskPlanner
from services.gateway.template import ModelText

if TYPE_CHECKING:
    from protocol.client.model_client import ModelClient, ModelUse

STATUS_S = 4.0
"""Longest wait for an orchestrator's status, and for the list of models.

It is shorter than the silence after which a stream begins, so that a stack that does not answer
still yields an HTTP status.
"""

_FRESH_S = 0.1
"""Seconds for which a status counts as current."""

Connect = Callable[[str], AsyncClient]
"""Creates a client of the orchestrator at an address."""


class ServedModel(Closeable):
    """One model: its orchestrator, and the settings in its folder for requests and answers."""

    def __init__(self, told: GatewayModel, connect: Connect, max_draft_tokens: int) -> None:
        self.names = told.names
        self.sampling = told.sampling
        """Defaults for requests."""
        self._max_draft_tokens = max_draft_tokens
        self.drafters = told.drafters
        self._folder = ""
        self._connect = connect
        self._address = told.clients_address
        self._client: AsyncClient | None = None
        self._asked: asyncio.Task[Status] | None = None
        """The latest status query."""
        self._asked_at = 0.0
        """Time of its answer."""
        self.read(told.folder)

    def read(self, folder: str) -> None:
        """Read its files from this folder; an empty name means not known yet."""
        if folder and folder == self._folder:
            return
        self._folder = folder
        self.planner = TaskPlanner(
            ModelText(Path(folder) if folder else None), max_draft_tokens=self._max_draft_tokens
        )

    @property
    def name(self) -> str:
        """Its name in answers."""
        return self.names[0]

    @property
    def client(self) -> AsyncClient:
        """The client of its orchestrator."""
        if self._client is None:
            self._client = self._connect(self._address)
        return self._client

    async def status(self) -> Status:
        """Return the status of its orchestrator; concurrent callers share one query."""
        loop = asyncio.get_running_loop()
        if self._asked is None or loop.time() - self._asked_at > _FRESH_S:
            self._asked = asyncio.ensure_future(self.client.status(STATUS_S))
            self._asked.add_done_callback(self._on_status)
            self._asked_at = math.inf
        return await asyncio.shield(self._asked)

    def _on_status(self, asked: "asyncio.Task[Status]") -> None:
        """Keep an answer for a moment, but no failure."""
        self._asked_at = asyncio.get_running_loop().time()
        if asked.cancelled() or asked.exception() is not None:
            self._asked = None

    def check_drafter(self, wanted: str | None, status: Status) -> None:
        """Raise ApiError if a request names a drafter that is not running."""
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
    """A model in use by a request until this is closed."""

    def __init__(self, model: ServedModel, use: "ModelUse | None") -> None:
        self.model = model
        self._use = use

    @property
    def is_ready(self) -> bool:
        """True if the model is loaded without being requested."""
        return self._use is None

    async def await_ready(self, timeout_s: float) -> None:
        """Wait until the model is loaded; errors as for `ModelUse.await_ready`."""
        if self._use is not None:
            ready = await self._use.await_ready(timeout_s)
            self.model.read(ready.folder)
            self.model.sampling = ready.sampling

    def close(self) -> None:
        """Release the model; safe to call twice."""
        if self._use is not None:
            self._use.close()


class ServedModels(Closeable):
    """All models of a gateway."""

    def __init__(self, settings: GatewaySettings, connect: Connect) -> None:
        most = settings.max_draft_tokens
        self._models = [ServedModel(told, connect, most) for told in settings.models]
        self._by_name = {name: model for model in self._models for name in model.names}
        self._server = _connect(settings.model_server) if settings.model_server else None

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def find(self, name: str | None) -> ServedModel:
        """Return the model of this name, or the first one if none is named; raises ApiError."""
        if not name or name == _MLX_LM_DEFAULT:
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
        """Lease the task's model, to be awaited. Raises ApiError if there is none."""
        model = self.find(task.model)
        if self._server is None:
            return Lease(model, None)
        drafter = task.drafter if task.drafter in model.drafters else None
        return Lease(model, self._server.use(model.name, drafter or ""))

    async def describe(self) -> dict[str, ModelStatus]:
        """Return the states of the models by name; empty without a model server."""
        if self._server is None:
            return {}
        return {one.name: one for one in await self._server.list_models(STATUS_S)}

    async def statuses(self) -> list[Status]:
        """Return the statuses of the orchestrators of all loaded models."""
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
"""mlx-lm clients' name for the model, or drafter, that the server was started with."""


def _connect(model_server: str) -> "ModelClient":
    from protocol.client.model_client import ModelClient  # noqa: PLC0415

    return ModelClient(model_server)


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
