"""A drafter outside this process, as seen by the relay."""

from typing import Protocol

from protocol.messages import FromDrafter, ToService
from protocol.transport.channel import Poller


class DrafterPeer(Protocol):
    """A drafter in another program or on another machine, and the connection to it."""

    backend: str
    """Its name for the orchestrator."""

    @property
    def name(self) -> str:
        """Name of the program in errors."""
        ...

    def last_words(self, reason: str) -> str:
        """Return why it is gone, as a sentence; `reason` is that of the connection's end."""
        ...

    def watch(self, poller: Poller) -> None:
        """Have this poller wait for it too; called before each wait."""
        ...

    def ready(self, timeout_s: float) -> bool:
        """Return True if a message is waiting, after at most `timeout_s` seconds.

        Raises:
            StreamEnded: there is no connection any more.
            ProtocolError: the received data cannot be cut into messages.
        """
        ...

    def receive(self, timeout_s: float, what: str) -> FromDrafter:
        """Return the next message; `what` names it in errors, which are also those of `ready`.

        Raises:
            DeadlineExceeded: nothing arrived in time.
        """
        ...

    def post(self, message: ToService) -> None:
        """Queue a message; raises ProtocolError if the drafter no longer reads."""
        ...

    def flush(self) -> None:
        """Send as much of the queue as possible without waiting."""
        ...
