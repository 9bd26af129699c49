"""HTTP connections with limits on their number and their time, served in turns.

Data is parsed in small slices, one connection after the other, so that none of them delays the
others. A connection that is idle, or whose client has stopped reading, makes way for a new one.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 2000
_OTHERS = 256
"""File descriptors for everything else."""
_HEAD_S = 10.0
"""Longest wait for the head of a request, from its start or from the connection's."""
_NEW_S = 1.0
"""A connection is not idle before: what it has sent may not have been read yet."""
_LOOK_S = 0.1
"""Shortest time between two searches for idle connections: among thousands each takes 5 ms."""
_STALL_S = 20.0
"""A client that has read nothing for this long has stopped reading."""
_UNREAD_S = 600.0
"""Longest wait for it to go on."""
_MOST_UNREAD = 64
"""Clients that may have stopped reading: each holds the unread part of its answer in memory."""
_SLICE = 4096
"""Bytes parsed at once: some ten milliseconds if each has its own chunk."""
_OVERHEAD = 64 * 1024
"""Bytes by which the chunks of a body may exceed twice its contents."""

_REASON = b"""{"error": {"message": "too many connections; try again later", "code": "busy"}}"""
_BUSY = b"\r\n".join(
    [
        b"HTTP/1.1 503 Service Unavailable",
        b"content-type: application/json",
        b"retry-after: 1",
        b"connection: close",
        b"content-length: %d" % len(_REASON),
        b"",
        _REASON,
    ]
)


def count_connections(descriptors: int) -> int:
    """Return the maximum number of connections: each request needs its own descriptors."""
    return max(1, min(_MOST_CONNECTIONS, (descriptors - _OTHERS) // 3))


class Turns:
    """Parses received data, a slice per connection in turn."""

    def __init__(self) -> None:
        self._waiting: deque[HttpConnection] = deque()
        self.idle: deque[HttpConnection] = deque()
        """Connections that were idle when one was last looked for, the oldest first."""
        self.looked_at = -math.inf

    def add(self, connection: "HttpConnection") -> None:
        """Queue a connection that has received data."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._parse)
        self._waiting.append(connection)

    def _parse(self) -> None:
        connection = self._waiting.popleft()
        try:
            if connection.parse_slice():
                self._waiting.append(connection)
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._parse)


class HttpConnection(H11Protocol):
    """One connection."""

    most = _MOST_CONNECTIONS
    """Set once the number of descriptors is known."""
    turns = Turns()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: deque[bytes] = deque()
        """Data received and not parsed yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._parsed = 0
        """Raw bytes of the current body."""
        self._held = 0
        """Content bytes of the current body."""
        self._heard_at = self.loop.time()
        self._unread_since = math.inf
        """Time at which the client had stopped reading."""

    @property
    def is_unread(self) -> bool:
        """True if the client has stopped reading its answer."""
        return self._unread_since < math.inf

    @property
    def is_answered(self) -> bool:
        """True while a request is answered to a client that reads, or waits to be parsed."""
        is_answering = self._is_busy and not self.cycle.more_body and not self.is_unread
        return bool(self._sent) or is_answering

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, replacing an idle one if necessary, or refuse it."""
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._replace_another():
            transport.write(_BUSY)
            transport.close()
            return
        self._time(_HEAD_S, "no request came")

    def _replace_another(self) -> bool:
        """Close the connection that has been idle longest; False if all are being answered."""
        now, turns = self.loop.time(), self.turns
        if not turns.idle and now >= turns.looked_at + _LOOK_S:
            turns.looked_at = now
            idle = (one for one in self._others() if one._is_idle(now))
            turns.idle.extend(sorted(idle, key=lambda one: one._heard_at))
        while turns.idle:
            oldest = turns.idle.popleft()
            if oldest in self.connections and oldest._is_idle(now):
                self.connections.discard(oldest)
                oldest.transport.abort()
                return True
        return False

    def _is_idle(self, now: float) -> bool:
        return not self.is_answered and self._heard_at <= now - _NEW_S

    def _others(self) -> Iterator["HttpConnection"]:
        return (one for one in self.connections if isinstance(one, HttpConnection))

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the data it has received."""
        self._sent.clear()
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Queue the data for parsing.

        Reading goes on until more comes, or the end: who has left by its turn costs nothing.
        """
        self._heard_at = self.loop.time()
        if self._sent:
            self.flow.pause_reading()
        else:
            self.turns.add(self)
        self._sent.append(data)

    def parse_slice(self) -> bool:
        """Parse the next bytes; return True if there are more."""
        if not self._sent or self.transport.is_closing():
            self._sent.clear()
            return False
        data = self._sent.popleft()
        if len(data) > _SLICE:
            self._sent.appendleft(data[_SLICE:])
        self._parse(data[:_SLICE])
        if not self._sent:
            self.flow.resume_reading()
        return bool(self._sent)

    def _parse(self, data: bytes) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        before = len(cycle.body) if cycle is not None else 0
        super().data_received(data)
        if self.cycle is not cycle:
            self._parsed = self._held = before = 0
        if not self._is_busy:
            if self._timer is None:
                self._time(_HEAD_S, "a request did not come to its end")
            return
        self._stop_timer()
        self._parsed += len(data)
        self._held += len(self.cycle.body) - before
        if self.cycle.more_body and self._parsed > 2 * self._held + _OVERHEAD:
            self._sent.clear()
            self.send_400_response("The chunks of the body are too small.")

    # ------------------------------------------------------------ clients that do nothing

    def pause_writing(self) -> None:
        """Start a timeout for a client that does not read; its answer waits meanwhile."""
        super().pause_writing()
        self._stop_timer()
        self._timer = self.loop.call_later(_STALL_S, self._mark_unread)

    def resume_writing(self) -> None:
        """Stop the timeout: the client reads again."""
        super().resume_writing()
        self._unread_since = math.inf
        self._stop_timer()

    def _mark_unread(self) -> None:
        """Wait longer for this client, unless too many have stopped reading."""
        self._unread_since = self.loop.time()
        self._time(_UNREAD_S, _UNREAD)
        unread = sorted(
            (one for one in self._others() if one.is_unread), key=lambda one: one._unread_since
        )
        for one in unread[:-_MOST_UNREAD]:
            one._give_up(_UNREAD)

    def _time(self, seconds: float, why: str) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._give_up, why)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, why: str) -> None:
        if self._sent and not self.is_unread:  # it came in time, and waits to be parsed
            self._time(_HEAD_S, why)
            return
        _log.info("connection closed: %s", why)
        self._stop_timer()
        self.transport.abort()


_UNREAD = "the client does not read its answer"
