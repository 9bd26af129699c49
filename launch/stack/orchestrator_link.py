"""The supervisor's connection to the orchestrator, isolated from its faults."""

from protocol.client.client import Client
from protocol.errors import DeadlineExceeded, RuntimeFailure
from protocol.messages import ServiceDown, Status
from protocol.process.closeable import Closeable


class OrchestratorLink(Closeable):
    """Sends and asks without raising: an orchestrator that does not read must be replaced.

    A message that cannot be sent is lost, and the connection restarts with an empty queue. Messages
    that remain relevant are repeated to a new orchestrator.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = Client(address)
        self._failure = ""

    def take_failure(self) -> str:
        """Return once why the orchestrator must be replaced; empty if all is well."""
        failure, self._failure = self._failure, ""
        return failure

    def request_status(self) -> None:
        """Ask without waiting; `poll_status` returns the answer."""
        try:
            self._client.request_status()
        except RuntimeFailure as error:
            self._renew(error)

    def poll_status(self) -> Status | None:
        """Return the latest status that has arrived."""
        try:
            return self._client.poll_status()
        except RuntimeFailure as error:
            self._renew(error)
            return None

    def await_status(self, timeout_s: float) -> Status | None:
        """Return the status, unless the orchestrator is busy or absent."""
        try:
            return self._client.status(timeout_s)
        except DeadlineExceeded:
            return None
        except RuntimeFailure as error:
            self._renew(error)
            return None

    def report_service_down(self, message: ServiceDown) -> None:
        """Report that a process ended."""
        try:
            self._client.report_service_down(message)
        except RuntimeFailure as error:
            self._renew(error)

    def _renew(self, error: RuntimeFailure) -> None:
        self._failure = str(error)
        self._client.close()
        self._client = Client(self._address)

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        self._client.close()
