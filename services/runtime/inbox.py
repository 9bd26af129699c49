"""Messages that a service has not handled yet; heartbeats are handled here."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from protocol.errors import ProtocolError
from protocol.messages import (
    CloseSequence,
    DraftNow,
    Extend,
    Features,
    Heartbeat,
    Identify,
    OpenSequence,
    Prepare,
    ReadTarget,
    Rejected,
    Revoke,
    Stop,
    ToService,
    Verify,
    Welcome,
)
from services.runtime.heartbeat import HeartbeatTimer, Sender
from services.runtime.idle_flag import IdleFlag

Work = (
    OpenSequence
    | CloseSequence
    | Verify
    | Revoke
    | Extend
    | Prepare
    | DraftNow
    | ReadTarget
    | Features
)


class Connection(Sender, Protocol):
    """The channel to the orchestrator that a service needs: a `Channel` or a `PipeChannel`."""

    def ready(self, timeout_s: float) -> bool:
        """Return True if a message is waiting, after at most `timeout_s` seconds."""
        ...

    def await_news(self, timeout_s: float) -> bool:
        """Wait as `ready` does, but return False at once when the other end may be a new one."""
        ...

    def receive(self, timeout_s: float, what: str) -> ToService:
        """Return the next message; `what` names it in errors."""
        ...


class Inbox:
    """Reads messages between two steps of work, and sends heartbeats.

    Args:
        flag: set while there is nothing to do.
    """

    def __init__(self, channel: Connection, flag: IdleFlag | None = None) -> None:
        self._channel, self._flag = channel, flag
        if flag is not None:
            flag.is_idle = False
        self.heartbeat = HeartbeatTimer(channel)
        self.messages: deque[Work | Stop] = deque()
        self.expect_s: Callable[[], float] = lambda: 0.0
        """How long the next step of work takes, as far as the service knows."""
        self.forgotten = False
        """True once the orchestrator no longer knows this service; the messages here are stale."""

    def start(self) -> None:
        """Clear everything after a completed handshake."""
        self.messages.clear()
        self.forgotten = False
        self.heartbeat.on_receive()

    def wait(self) -> None:
        """Wait until there may be a message, sending heartbeats meanwhile."""
        if not self.messages and not self._await_news():
            self.heartbeat.beat(early=True)  # a beat is due, or the orchestrator may be a new one
            return
        self._read()
        self.heartbeat.beat()

    def _await_news(self) -> bool:
        if self._flag is None:
            return self._channel.await_news(self.heartbeat.wait_s)
        self._flag.is_idle = True
        try:
            return self._channel.await_news(self.heartbeat.wait_s)
        finally:
            self._flag.is_idle = False

    def look(self, sequence: int) -> None:
        """Read the messages that have arrived during work on this sequence."""
        self._read()
        self.heartbeat.beat(sequence, expected_s=self.expect_s())

    def linger(self, timeout_s: float) -> bool:
        """Wait briefly for a message; return True if there is one."""
        return timeout_s > 0.0 and self._channel.ready(timeout_s)

    def _read(self) -> None:
        while self._channel.ready(0.0):
            message = self._channel.receive(0.0, "message")
            self.heartbeat.on_receive()
            match message:
                case Heartbeat():
                    pass  # the answer to our own beat
                case Identify():
                    # A stopping service may also be asked for its identity: the stop counts.
                    self.forgotten = not any(isinstance(m, Stop) for m in self.messages)
                    if self.forgotten:
                        self.messages.clear()
                    return
                case Welcome():
                    pass  # we sent Hello twice, as the first one seemed to be lost
                case Rejected():
                    raise ProtocolError(f"{type(message).__name__} after the handshake")
                case _:
                    self.messages.append(message)
