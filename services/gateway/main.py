"""`python -m services.gateway.main SETTINGS`: the gateway process."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import uvicorn

from protocol.errors import UsageError
from protocol.gateway import GatewaySettings
from protocol.process.child import raise_descriptor_limit, run_child
from protocol.process.heap import collect_rarely, freeze_heap
from protocol.process.step_times import StepTimes
from services.gateway.app import Gateway
from services.gateway.http.connections import HttpConnection, count_connections
from services.gateway.http.loop import ACCEPTS, AwakeLoop, ListeningSocket

_KEEP_ALIVE_S = 30
_SHUTDOWN_S = 1
"""Answers in progress are cut off after this time, because the stack ends too."""


def run(settings: GatewaySettings) -> None:
    """Serve HTTP on the socket that the supervisor listens on, until stopped."""
    steps = StepTimes()
    config = uvicorn.Config(
        Gateway(settings, steps=steps).app(_key(settings.key_file)),
        log_config=None,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        server_header=False,
        proxy_headers=False,  # limits are counted by address, which clients must not choose
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        http=HttpConnection,
        backlog=ACCEPTS,
    )
    HttpConnection.most = count_connections(raise_descriptor_limit())
    freeze_heap()
    collect_rarely()
    listener = ListeningSocket(fileno=settings.listener)
    with listener, asyncio.Runner(loop_factory=partial(AwakeLoop, steps)) as runner:
        runner.run(uvicorn.Server(config).serve(sockets=[listener]))


def _key(file: str) -> str:
    """Return the API key; "" only if none is configured.

    Raises:
        UsageError: the key cannot be read, as after a write to a full disk.
    """
    if not file:
        return ""
    try:
        key = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the API key cannot be read: {error}") from error
    if not key:
        raise UsageError(f"the API key in {file!r} is empty; the server does not start without it")
    return key


if __name__ == "__main__":
    sys.exit(run_child("gateway", GatewaySettings, run))
