"""Normalise request paths: slashes too many, no /v1 or two of them."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_VERSIONED = {"chat", "completions", "messages", "responses", "models"}
"""First parts of paths below /v1."""


class Paths:
    """Passes requests on under the path that the routes know.

    mlx-lm and llama.cpp answer without /v1, and a client whose base URL ends in it may add it once
    more.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http":
            scope = {**scope, "path": normalise_path(scope["path"])}
        await self._app(scope, receive, send)


def normalise_path(path: str) -> str:
    """Return the path that the routes know."""
    place, models, name = path.partition("/models/")  # a name may be a path
    path = "/" + (re.sub("/+", "/", place) + models + name).strip("/")
    while path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    if path == "/v1/health":
        return "/health"
    return f"/v1{path}" if path.split("/")[1] in _VERSIONED else path
