"""Which services are connected, and whether a new one may be: the handshake's judgement."""

from dataclasses import dataclass

from protocol.fingerprint import Vocabulary
from protocol.messages import PROTOCOL_VERSION, Hello, Role, ServiceStatus, Status


@dataclass(frozen=True)
class Peer:
    """A service that has shaken hands."""

    address: bytes
    hello: Hello

    def status(self) -> ServiceStatus:
        """What clients are told about it."""
        return ServiceStatus(
            role=self.hello.role,
            pid=self.hello.pid,
            backend=self.hello.backend,
            model=self.hello.model,
            compute_unit=self.hello.compute_unit,
            context_length=self.hello.context_length,
            emulated_cost=self.hello.emulated_cost,
        )


def objection(hello: Hello, target: Vocabulary) -> str | None:
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

    def __init__(self) -> None:
        self.peers: dict[Role, Peer] = {}
        self.refused: dict[Role, str] = {}
        self._by_address: dict[bytes, Peer] = {}

    def at(self, address: bytes) -> Peer | None:
        """The service with this address, if it is current."""
        return self._by_address.get(address)

    @property
    def context_length(self) -> int:
        """What the target can attend to; 0 while there is none, or no limit."""
        verifier = self.peers.get("verifier")
        return verifier.hello.context_length if verifier is not None else 0

    def adopt(self, peer: Peer) -> Peer | None:
        """Make a service current; returns the one that it replaces."""
        self.refused.pop(peer.hello.role, None)
        old = self.peers.get(peer.hello.role)
        if old is not None:
            self._by_address.pop(old.address, None)
        self.peers[peer.hello.role] = peer
        self._by_address[peer.address] = peer
        return old

    def status(self, pid: int, model: str, active: int, waiting: int) -> Status:
        """What clients are told: the orchestrator itself, and its current services."""
        return Status(
            pid=pid,
            model=model,
            services=[peer.status() for peer in self.peers.values()],
            active=active,
            waiting=waiting,
            refused=self.refused,
        )

    def drop(self, role: Role, pid: int) -> bool:
        """Forget a service that died; False if it was not the current one."""
        peer = self.peers.get(role)
        if peer is None or peer.hello.pid != pid:
            return False
        del self.peers[role]
        self._by_address.pop(peer.address, None)
        return True
