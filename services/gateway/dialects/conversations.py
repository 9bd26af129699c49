"""Earlier responses, kept so that clients can continue them by id."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from protocol.messages import ChatMessage

_MOST = 1000
_MOST_BYTES = 64 * 1024**2


class _Stored(NamedTuple):
    messages: Sequence[ChatMessage]
    body: dict[str, Any]
    size: int


class Conversations:
    """Holds responses in memory, up to a limit; the least recently used are dropped first."""

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._bytes = 0

    def keep(self, name: str, messages: Sequence[ChatMessage], body: dict[str, Any]) -> None:
        """Keep a response: the conversation up to its end, and its body."""
        size = len(msgspec.msgpack.encode(messages)) + len(msgspec.msgpack.encode(body))
        self._stored[name] = _Stored(messages, body, size)
        self._bytes += size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            self.forget(next(iter(self._stored)))

    def find(self, name: str) -> Sequence[ChatMessage] | None:
        """Return the conversation up to the end of a response; None if it is unknown."""
        if name not in self._stored:
            return None
        self._stored.move_to_end(name)
        return self._stored[name].messages

    def body(self, name: str) -> dict[str, Any] | None:
        """Return the body of a response."""
        stored = self._stored.get(name)
        return stored.body if stored else None

    def item(self, name: str) -> dict[str, Any] | None:
        """Return an item of a response's output."""
        body = self.body(f"resp_{name.partition('_')[2][:24]}")  # what both ids have in common
        return next((item for item in body["output"] if item["id"] == name), None) if body else None

    def forget(self, name: str) -> bool:
        """Drop a response; return True if there was one."""
        stored = self._stored.pop(name, None)
        self._bytes -= stored.size if stored else 0
        return stored is not None
