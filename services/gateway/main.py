"""`python -m services.gateway.main SETTINGS`: the gateway process."""

import socket
import sys
from pathlib import Path

import uvicorn

from protocol.async_client import AsyncClient
from protocol.child import main
from protocol.settings import GatewaySettings
from services.gateway.app import Gateway

_KEEP_ALIVE_S = 30
_FAREWELL_S = 1
"""Answers in flight are cut after this long, because the stack ends too."""


def run(settings: GatewaySettings) -> None:
    """Serve HTTP on the socket that the supervisor listens on, until told to end."""
    key = Path(settings.key_file).read_text(encoding="utf-8") if settings.key_file else ""
    with AsyncClient(settings.clients_address) as client:
        config = uvicorn.Config(
            Gateway(settings, client).app(key),
            log_config=None,
            log_level=settings.log_level,
            access_log=settings.log_level == "debug",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FAREWELL_S,
        )
        with socket.socket(fileno=settings.listener) as listener:
            uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main("gateway", GatewaySettings, run))
