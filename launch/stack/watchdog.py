"""The watchdog: finds children that must be killed because they are stuck, and why.

Five cases: a child is stopped (SIGSTOP), the orchestrator marked it (it hangs in a call, or sends
invalid messages), it never became ready, or it is the orchestrator and does not answer, or neither
reads nor writes messages as it should.
"""

import time
from collections.abc import Iterable

from launch.settings.settings import StackSettings
from launch.stack.child import Child
from launch.stack.orchestrator_link import OrchestratorLink
from launch.stack.readiness import START_LIMIT
from launch.stack.run_dir import RunDir
from orchestrator.hang_detector import HangDetector
from protocol.messages import Status, ToSupervisor
from protocol.process.closeable import Closeable
from protocol.process.helper import is_stopped
from protocol.transport.channel import STRANGER_BYTES, Hub
from protocol.transport.codec import Decoder

_ASK_S = 0.25
_FIRST_ANSWER_S = 15.0
"""Time limit for a replacement orchestrator's first answer: it has nothing to load. Clients wait
for twice as long.
"""
_STOPPED_S = 1.0
"""A pause of this length is tolerated; a longer one is an outage."""


class Watchdog(Closeable):
    """Watches the children of one stack, through the system and through the orchestrator."""

    def __init__(self, clients_address: str, settings: StackSettings) -> None:
        self._link = OrchestratorLink(clients_address)
        self._start_timeout_s = settings.start_timeout_s
        self._first_answer_s = max(_FIRST_ANSWER_S, settings.hang_timeout_s)
        self._loading = HangDetector(settings.start_timeout_s, settings.start_timeout_s)
        self._answering = HangDetector(settings.hang_timeout_s, settings.start_timeout_s)
        self._stopped = HangDetector(_STOPPED_S, _STOPPED_S, _STOPPED_S / 2)
        self._seen: dict[HangDetector, set[bytes]] = {
            detector: set() for detector in (self._loading, self._answering, self._stopped)
        }
        self._asked = 0.0
        self.status: Status | None = None
        """The orchestrator's latest status."""

    def ready(self, child: Child) -> bool:
        """Return True if it has completed its handshake, or answered."""
        if self.status is None:
            return False
        if child.role == "orchestrator":
            return self.status.pid == child.pid
        return child.pid in {service.pid for service in self.status.services}

    def look(self, children: Iterable[Child], starting: set[str]) -> dict[str, str]:
        """Return the roles whose process must be killed, and why."""
        now = time.monotonic()
        self._ask(now)
        living = {_key(child): child for child in children if child.exit_code is None}
        self._watch(self._loading, {k for k, c in living.items() if c.role in starting})
        # A request may block the next orchestrator, too, before it has answered here.
        first_s = None if self.status is None else self._first_answer_s
        orchestrator = {k for k, c in living.items() if c.role == "orchestrator"}
        self._watch(self._answering, orchestrator, first_s)
        self._watch(self._stopped, {k for k, c in living.items() if is_stopped(c.pid)})
        reasons = self._find_marked(living.values())
        if failure := self._link.take_failure():
            reasons |= {c.role: failure for c in living.values() if c.role == "orchestrator"}
        for detector, what in (
            (self._loading, f"was not ready within {self._start_timeout_s:g} s ({START_LIMIT})"),
            (self._answering, "hangs: it does not answer any more"),
            (self._stopped, f"was stopped for more than {_STOPPED_S:g} s"),
        ):
            for key in detector.update(now):
                reasons[living[key].role] = f"the {living[key].role} {what}"
        return reasons

    def _ask(self, now: float) -> None:
        status = self._link.poll_status()
        if status is not None:
            self.status = status
            self._answering.on_message(str(status.pid).encode(), is_result=True)
        if now - self._asked >= _ASK_S:
            self._asked = now
            self._link.request_status()

    def _find_marked(self, living: Iterable[Child]) -> dict[str, str]:
        marked = self.status.marked_for_kill if self.status is not None else {}
        return {c.role: marked[c.pid] for c in living if c.pid in marked}

    def _watch(
        self, detector: HangDetector, keys: set[bytes], first_timeout_s: float | None = None
    ) -> None:
        """Watch exactly these children; those already watched keep their state."""
        watched = self._seen[detector]
        for key in keys - watched:
            detector.watch(key, first_timeout_s)
        for key in watched - keys:
            detector.forget(key)
        self._seen[detector] = keys

    def close(self) -> None:
        """Close the connection to the orchestrator."""
        self._link.close()


class SupervisorPost(Closeable):
    """The supervisor's sockets: one for commands, and the connection to the orchestrator."""

    def __init__(self, run_dir: RunDir, settings: StackSettings) -> None:
        self.control: Hub[ToSupervisor] = Hub(
            run_dir.control_address, Decoder(ToSupervisor), stranger_bytes=STRANGER_BYTES
        )
        self.link = OrchestratorLink(run_dir.clients_address)
        self.watchdog = Watchdog(run_dir.clients_address, settings)

    def close(self) -> None:
        """Close them; safe to call twice."""
        self.watchdog.close()
        self.link.close()
        self.control.close()


def _key(child: Child) -> bytes:
    return str(child.pid).encode()
