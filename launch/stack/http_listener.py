"""The listening socket of the HTTP gateway, and the check of its address."""

import contextlib
import errno
import http.client
import socket
from pathlib import Path

from launch.settings.settings import StackSettings
from protocol.errors import UsageError
from protocol.process.closeable import Closeable
from protocol.transport.address import is_loopback

_BACKLOG = 512


class HttpListener(Closeable):
    """Listens as long as the stack lives; gateways are replaced behind it.

    Raises:
        UsageError: the address is taken or unknown, or it is public and there is no key.
    """

    def __init__(self, settings: StackSettings) -> None:
        host, port = settings.host, settings.port
        self.host = host
        self._socket: socket.socket | None = None
        if not settings.api_key and not is_loopback(host):
            raise UsageError(
                f"{host!r} can be reached by others: set an API key (SSD_API_KEY), "
                "or listen on 127.0.0.1"
            )
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            # `localhost` is often both; most clients mean IPv4.
            family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self.close()
            reason = error.strerror or error
            hint = "; give another --port" if error.errno == errno.EADDRINUSE else ""
            raise UsageError(f"cannot listen on {host}:{port}: {reason}{hint}") from error

    @property
    def listener(self) -> int:
        """Its file descriptor."""
        return self._open.fileno()

    @property
    def url(self) -> str:
        """URL of the address."""
        port = self._open.getsockname()[1]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}"

    def answers(self, timeout_s: float) -> bool:
        """Return True if a gateway answers on the socket."""
        host, port = self._open.getsockname()[:2]
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status > 0
            except (OSError, http.client.HTTPException):
                return False

    @property
    def _open(self) -> socket.socket:
        if self._socket is None:
            raise UsageError("the HTTP door is closed")
        return self._socket

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def write_key(folder: Path, key: str) -> str:
    """Write the API key to a file for the gateway; return the file, or "" without a key."""
    if not key:
        return ""
    path = folder / "api-key"
    path.touch(mode=0o600)
    path.write_text(key, encoding="utf-8")
    return str(path)
