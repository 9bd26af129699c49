"""`python -m services.gateway.main SETTINGS`: the gateway process."""

import socket
import sys
from pathlib import Path

import uvicorn

from protocol.errors import UsageError
from protocol.gateway import GatewaySettings
from protocol.process.child import run_child
from services.gateway.app import Gateway

_KEEP_ALIVE_S = 30
_SHUTDOWN_S = 1
"""Answers in flight are cut after this long, because the stack ends too."""


def run(settings: GatewaySettings) -> None:
    """Serve HTTP on the socket that the supervisor listens on, until told to end."""
    config = uvicorn.Config(
        Gateway(settings).app(_key(settings.key_file)),
        log_config=None,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    with socket.socket(fileno=settings.listener) as listener:
        uvicorn.Server(config).run(sockets=[listener])


def _key(file: str) -> str:
    """What clients must know; "" only if there is to be none.

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
        raise UsageError(f"the API key in {file!r} is empty; without it the door stays shut")
    return key


if __name__ == "__main__":
    sys.exit(run_child("gateway", GatewaySettings, run))
