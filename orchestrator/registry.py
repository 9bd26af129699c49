"""Which services are connected, and whether a new one may be: the handshake's judgement."""

import logging
from dataclasses import dataclass

from orchestrator.hang_detector import HangDetector
from protocol.decoding.vocabulary import Vocabulary
from protocol.messages import PROTOCOL_VERSION, Hello, Role, ServiceStatus, Status, StatusRequest

_log = logging.getLogger(__name__)

_MOST_CONDEMNED = 32
"""Nobody ends a process that is not the supervisor's own: such names must not pile up."""


@dataclass(frozen=True)
class Peer:
    """A service that has shaken hands."""

    address: bytes
    hello: Hello

    def status(self, silent_s: float) -> ServiceStatus:
        """What clients are told about it."""
        return ServiceStatus(
            silent_s=silent_s,
            role=self.hello.role,
            pid=self.hello.pid,
            backend=self.hello.backend,
            model=self.hello.model,
            compute_unit=self.hello.compute_unit,
            context_length=self.hello.context_length,
            emulated_cost=self.hello.emulated_cost,
            ranks=self.hello.ranks,
        )


def context_of(hello: Hello) -> int:
    """What one sequence may hold there: the model's limit, or its KV's; 0 means unlimited."""
    return min((n for n in (hello.context_length, hello.kv_tokens) if n), default=0)


def handshake_error(hello: Hello, target: Vocabulary) -> str | None:
    """Why this service cannot join, in one sentence; None if it can."""
    if hello.protocol != PROTOCOL_VERSION:
        return (
            f"the {hello.role} speaks protocol version {hello.protocol} and the orchestrator "
            f"{PROTOCOL_VERSION}; start all processes from the same installation"
        )
    if not hello.tokenizer_fingerprint:
        return None if hello.role == "drafter" else "the verifier has no tokenizer"
    if hello.tokenizer_fingerprint == target.fingerprint:
        return None
    if hello.vocabulary_size != target.size:
        return (
            f"the {hello.role} model {hello.model!r} has a vocabulary of {hello.vocabulary_size} "
            f"tokens and the target one of {target.size}; a pair must share its tokenizer"
        )
    return (
        f"the {hello.role} model {hello.model!r} numbers its {target.size} tokens differently "
        "from the target; a pair must share its tokenizer"
    )


class Registry:
    """The current verifier and drafter, and why the last candidate was refused."""

    def __init__(self, vigil: HangDetector, pid: int, model: str) -> None:
        self._pid = pid
        self._model = model
        self.vigil = vigil
        self.peers: dict[Role, Peer] = {}
        self.refused: dict[Role, str] = {}
        self.marked_for_kill: dict[int, str] = {}
        """Processes of this stack that must be ended, and why."""
        self._by_address: dict[bytes, Peer] = {}

    def at(self, address: bytes) -> Peer | None:
        """The service with this address, if it is current."""
        return self._by_address.get(address)

    @property
    def context_length(self) -> int:
        """What the target can attend to; 0 while there is none, or no limit."""
        verifier = self.peers.get("verifier")
        return context_of(verifier.hello) if verifier is not None else 0

    @property
    def kv_tokens(self) -> int:
        """What the target's KV may hold in all; 0 while there is none, or no limit."""
        verifier = self.peers.get("verifier")
        return verifier.hello.kv_tokens if verifier is not None else 0

    def outlived(self, peer: Peer) -> bool:
        """Whether a younger process has this service's place already."""
        current = self.peers.get(peer.hello.role)
        return current is not None and current.hello.started_ns > peer.hello.started_ns > 0

    def adopt(self, peer: Peer) -> Peer | None:
        """Make a service current; returns the one that it replaces."""
        self.refused.pop(peer.hello.role, None)
        old = self.peers.get(peer.hello.role)
        if old is not None:
            self._forget(old)
        self.peers[peer.hello.role] = peer
        self.vigil.begin(peer.address)
        self._by_address[peer.address] = peer
        return old

    def status(
        self,
        active: int,
        waiting: int,
        asked: StatusRequest,
        serving: bool,  # noqa: FBT001  # a field of the message
        dropped: int,
    ) -> Status:
        """What clients are told: the orchestrator itself, and its current services."""
        return Status(
            request=asked.request,
            question=asked.question,
            serving=serving,
            dropped=dropped,
            pid=self._pid,
            model=self._model,
            services=[p.status(self.vigil.silent_s(p.address)) for p in self.peers.values()],
            active=active,
            waiting=waiting,
            refused=self.refused,
            marked_for_kill=self.marked_for_kill,
            degraded=self._degraded(),
        )

    def _degraded(self) -> list[str]:
        missing = {
            "verifier": "there is no verifier at the moment: requests wait",
            "drafter": "there is no drafter at the moment: the target decodes plainly",
        }
        return [sentence for role, sentence in missing.items() if role not in self.peers]

    def mark_for_kill(self, peer: Peer, reason: str) -> None:
        """Have the supervisor end this process."""
        _log.error("%s", reason)
        self.marked_for_kill.setdefault(peer.hello.pid, reason)
        if len(self.marked_for_kill) > _MOST_CONDEMNED:
            del self.marked_for_kill[next(iter(self.marked_for_kill))]

    def hanging(self, now: float) -> list[tuple[Peer, str]]:
        """Services that have been silent for too long and were not condemned before; why."""
        silent = [self._by_address[address] for address in self.vigil.look(now)]
        return [
            (peer, f"the {peer.hello.role} hangs: no sign of life for {limit:.1f} s")
            for peer in silent
            if peer.hello.pid not in self.marked_for_kill
            for limit in [self.vigil.silent_s(peer.address)]
        ]

    def drop(self, role: Role, pid: int) -> bool:
        """Forget a service that died; False if it was not the current one."""
        self.marked_for_kill.pop(pid, None)
        peer = self.peers.get(role)
        if peer is None or peer.hello.pid != pid:
            return False
        del self.peers[role]
        self._forget(peer)
        return True

    def _forget(self, peer: Peer) -> None:
        self._by_address.pop(peer.address, None)
        self.vigil.end(peer.address)
