"""A client of the gateway that knows what it must hear, and clients that behave badly."""

import contextlib
import http.client
import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.bench.http_load import DONE, events
from protocol.messages import Generate

_TIMEOUT_S = 300.0
_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Heard:
    """What came of one HTTP request."""

    text: str
    whole: bool
    """Whether the stream ended as it should; if not, the client knows that it did not."""
    refused: str = ""
    """The sentence of a refusal."""


def ask_http(
    url: str, request: Generate, on_text: Callable[[], None], model: str = "default"
) -> Heard:
    """Ask the gateway for a stream; `on_text` is called with each piece of text.

    A connection that breaks is an outcome, not an exception.
    """
    text = ""
    try:
        with contextlib.closing(_connection(url)) as connection:
            body = json.dumps({**_body(request), "model": model})
            connection.request("POST", "/v1/chat/completions", body, _HEADERS)
            response = connection.getresponse()
            if response.status != 200:
                return Heard("", whole=False, refused=f"HTTP {response.status}")
            for data in events(response):
                if data == DONE:
                    return Heard(text, whole=True)
                event = json.loads(data)
                if "error" in event:
                    return Heard(text, whole=False, refused=str(event["error"]))
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    on_text()
    except (OSError, http.client.HTTPException):
        return Heard(text, whole=False)
    return Heard(text, whole=False)


def _connection(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=_TIMEOUT_S)


def _body(request: Generate) -> dict[str, Any]:
    return {
        "model": "default",
        "messages": [{"role": m.role, "content": m.content} for m in request.messages],
        "max_tokens": request.max_tokens,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "seed": request.sampling.seed,
        "stream": True,
    }


def malform(url: str, dice: random.Random) -> None:
    """Say things that are no HTTP, or not all of it."""
    wholes = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
        b"GET / HTTP/9.9\r\n" + b"X: y\r\n" * 2000 + b"\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b'Content-Length: 9\r\n\r\n{"a":[[[[',
        dice.randbytes(4000),
    )
    for whole in wholes:
        with contextlib.suppress(OSError), _raw(url) as connection:
            connection.sendall(whole[: dice.randrange(1, len(whole) + 1)])
            connection.settimeout(0.1)
            connection.recv(100)


def never_reads(url: str, request: Generate, seconds: float) -> None:
    """Ask for a stream, with the smallest buffers, and read nothing."""
    body = json.dumps(_body(request)).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    with contextlib.suppress(OSError), _raw(url) as connection:
        connection.sendall(head % len(body) + body)
        time.sleep(seconds)


def _raw(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(5.0)
    connection.connect((host, int(port)))
    return connection
