"""Access control: API key, origin, host and rate limit."""

import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.transport.address import is_loopback, parse_host
from services.gateway.errors import ApiError

_OPEN_PATHS = frozenset({"/", "/health"})
"""Paths without a key; without one they reveal nothing secret."""

_MOST_CLIENTS = 10_000
"""Clients remembered; the longest inactive are forgotten first."""


class RateLimit:
    """A token bucket per client: it holds a minute's requests and refills evenly.

    Args:
        per_minute: requests that a client may make; 0 means unlimited.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Client -> (requests left, time of that count)."""

    def wait_s(self, client: str, now: float) -> float:
        """Count a request, or return the seconds from `now` until one is allowed."""
        if not self._per_minute:
            return 0.0
        rate = self._per_minute / 60.0
        left, since = self._buckets.pop(client, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + rate * (now - since))
        allowed = left >= 1.0
        self._buckets[client] = (left - 1.0 if allowed else left, now)
        if len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - left) / rate


class Guard:
    """Refuses unauthorised requests before reading anything else of them.

    With an API key, the key decides. Without one the server listens on loopback only, and the
    browser is the danger: any web page may send requests to loopback. So the page's origin must be
    allowed; and because a page may resolve its own name to loopback, the request's host must mean
    this machine.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str,
        hosts: Sequence[str],
        origins: Sequence[str] = (),
        rate_limit: int = 0,
    ) -> None:
        self._app = app
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self._key = _digest(key.encode()) if key else b""
        self._hosts = {host.lower().strip("[]") for host in hosts}
        self._rate = RateLimit(rate_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse unauthorised requests; pass on all others."""
        if scope["type"] == "http":
            request = Request(scope)
            if fault := self._refuse(request) or self._check_rate(request):
                await fault.response(request.url.path)(scope, receive, send)
                return
            request.state.trusted = not self._key or self._knows_key(request)
        await self._app(scope, receive, send)

    def _refuse(self, request: Request) -> ApiError | None:
        if error := self._refuse_origin(request):
            return error
        if self._key:
            if request.method == "OPTIONS" or request.url.path in _OPEN_PATHS:
                return None
            return None if self._knows_key(request) else _NO_KEY
        header = request.headers.get("host", "")
        host = parse_host(header)
        if host is not None and (host in self._hosts or is_loopback(host)):
            return None
        reason = f"this server does not answer to the name {header[:100]!r}"
        return ApiError(403, reason, code="wrong_host")

    def _refuse_origin(self, request: Request) -> ApiError | None:
        """Refuse pages of other origins, as named by the browser; other programs send no origin."""
        origin = request.headers.get("origin", "").lower().rstrip("/")
        if "*" in self._origins or origin in self._origins:
            return None
        host = request.headers.get("host", "").lower()
        embedded = (
            request.headers.get("sec-fetch-site") == "cross-site"
            and request.headers.get("sec-fetch-mode") != "navigate"
        )
        if (origin.partition("://")[2] == host and host) or (not origin and not embedded):
            return None
        reason = f"pages of {origin or 'other sites'} may not use this server (allowed_origins)"
        return ApiError(403, reason, code="wrong_origin")

    def _check_rate(self, request: Request) -> ApiError | None:
        """Refuse a client that asks for too many answers per minute; other requests are free."""
        if request.method != "POST":
            return None
        # There is one key, so clients are distinguished by their addresses.
        client = request.client.host if request.client else ""
        wait_s = self._rate.wait_s(client, time.monotonic())
        if not wait_s:
            return None
        seconds = math.ceil(wait_s)
        reason = f"too many requests within a minute (rate_limit); try again in {seconds} s"
        return ApiError(429, reason, code="rate_limit_exceeded", retry_after_s=seconds)

    def _knows_key(self, request: Request) -> bool:
        # Digests have equal lengths, so comparing them does not reveal the key's length.
        return hmac.compare_digest(_digest(_read_key(request).encode()), self._key)


def name_client(request: Request) -> str:
    """Return the client for fair scheduling: its address and a digest of its key.

    Programs on one machine, or behind one proxy, are different clients if their keys differ.
    """
    address = request.client.host if request.client else ""
    key = _read_key(request)
    return f"{address} {_digest(key.encode()).hex()[:16]}" if key else address


def _read_key(request: Request) -> str:
    """Return the client's key; empty if it sends none."""
    if "x-api-key" in request.headers:  # as sent by Anthropic's clients
        return request.headers["x-api-key"].strip()
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


_NO_KEY = ApiError(
    401, "the API key is missing or wrong: send 'Authorization: Bearer KEY'", code="invalid_api_key"
)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
