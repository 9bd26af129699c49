"""Registry of connected services, and the handshake rules for new ones."""

import logging
from dataclasses import dataclass

from msgspec.structs import replace

from orchestrator.hang_detector import HangDetector
from orchestrator.message_budget import BYTES_OF_DRAFTERS, MessageBudget
from protocol.decoding.vocabulary import Vocabulary
from protocol.errors import ProtocolError
from protocol.messages import (
    PROTOCOL_VERSION,
    FromService,
    Heartbeat,
    Hello,
    Message,
    Prepared,
    Role,
)
from protocol.transport.channel import STRANGER_BYTES
from protocol.transport.codec import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)

_MOST_MARKED = 32
"""Bound on the marked processes: only the supervisor's children are ever ended."""


@dataclass(frozen=True)
class Peer:
    """A service that has completed its handshake."""

    address: bytes
    hello: Hello


def context_of(hello: Hello) -> int:
    """Return the tokens per sequence that its model and KV allow; 0 is unlimited."""
    return min((n for n in (hello.context_length, hello.kv_tokens) if n), default=0)


def handshake_error(hello: Hello, target: Vocabulary) -> str | None:
    """Return why this service cannot join, in one sentence; None if it can."""
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
    """The current verifier and drafter, and why the last candidate was rejected."""

    def __init__(self, hang_detector: HangDetector, *, lookup_only: bool = False) -> None:
        self.hang_detector = hang_detector
        self.peers: dict[Role, Peer] = {}
        self.rejected: dict[Role, str] = {}
        """Reason for the last rejection by role, until a service is accepted."""
        self.draws = False
        """True while the drafts of a running request carry their distributions, which are large."""
        self.unreadable = ""
        """Reason why the verifier cannot send the features the drafter needs, if so."""
        self.lookup_only = lookup_only
        """True if the stack runs without a drafter."""
        self.marked_for_kill: dict[int, str] = {}
        """Processes of this stack that must be ended, with the reason."""
        self._by_address: dict[bytes, Peer] = {}
        self._budgets: dict[bytes, MessageBudget] = {}
        """Message budgets of drafters."""
        self._working_on: dict[bytes, int] = {}
        """Sequences named by heartbeats, until another message arrives from that service."""

    def find(self, address: bytes) -> Peer | None:
        """Return the service with this address, if it is current."""
        return self._by_address.get(address)

    def on_message(self, address: bytes, message: FromService | ProtocolError) -> None:
        """Record a message as a sign of life, and what a service has prepared."""
        is_result = not isinstance(message, Heartbeat | Hello | Prepared)
        busy_s = message.busy_s if isinstance(message, Heartbeat) else 0.0
        self.hang_detector.on_message(address, is_result=is_result, busy_s=busy_s)
        if isinstance(message, Prepared) and (peer := self.find(address)) is not None:
            self._on_prepared(peer, message)
        if isinstance(message, Heartbeat) and address in self._by_address:
            self._working_on[address] = message.sequence
        else:
            self._working_on.pop(address, None)

    def _on_prepared(self, peer: Peer, message: Prepared) -> None:
        """Record what a service has prepared; it counts from the next request on."""
        hello = replace(
            peer.hello,
            preparation=message.preparation,
            pass_times=message.pass_times,
            takes_trees=message.takes_trees,
        )
        self.peers[hello.role] = self._by_address[peer.address] = Peer(peer.address, hello)

    def on_sent(self, address: bytes, message: Message) -> None:
        """Record that a service was sent this message: it may answer."""
        if (budget := self._budgets.get(address)) is not None:
            budget.on_sent(message)

    def spend(self, drafter: Peer, now: float) -> bool:
        """Charge a drafter for a message; return False if it exceeds the drafter's budget."""
        return self._budgets[drafter.address].spend(now)

    def limit_of(self, address: bytes) -> int:
        """Return the longest allowed message of a peer, in bytes."""
        peer = self._by_address.get(address)
        if peer is None:
            return STRANGER_BYTES
        small = peer.hello.role == "drafter" and not self.draws
        return BYTES_OF_DRAFTERS if small else MAX_MESSAGE_BYTES

    def working_on(self, peer: Peer) -> int:
        """Return the sequence that the service named last; 0 if it has sent a result since."""
        return self._working_on.get(peer.address, 0)

    @property
    def context_length(self) -> int:
        """Context length of the target; 0 if there is no target, or no limit."""
        verifier = self.peers.get("verifier")
        return context_of(verifier.hello) if verifier is not None else 0

    @property
    def memory_limit(self) -> str:
        """The memory limit behind `context_length`, if memory rather than the model limits it."""
        verifier = self.peers.get("verifier")
        if verifier is None or self.context_length == verifier.hello.context_length:
            return ""
        return verifier.hello.kv_limit

    @property
    def kv_tokens(self) -> int:
        """Total KV capacity of the target in tokens; 0 if there is no target, or no limit."""
        verifier = self.peers.get("verifier")
        return verifier.hello.kv_tokens if verifier is not None else 0

    def is_outdated(self, peer: Peer) -> bool:
        """Return True if a younger process already has this service's place."""
        current = self.peers.get(peer.hello.role)
        return current is not None and current.hello.started_ns > peer.hello.started_ns > 0

    def add(self, peer: Peer) -> Peer | None:
        """Make a service current; return the one that it replaces."""
        self.rejected.pop(peer.hello.role, None)
        old = self.peers.get(peer.hello.role)
        if old is not None:
            self._forget(old)
        self.peers[peer.hello.role] = peer
        self.hang_detector.watch(peer.address)
        self._by_address[peer.address] = peer
        if peer.hello.role == "drafter":
            self.lookup_only = False
            self._budgets[peer.address] = MessageBudget()
        return old

    def remove(self, role: Role, pid: int, *, for_good: bool = False) -> bool:
        """Remove a service; return False if it was not the current one.

        With `for_good`, no other drafter is expected.
        """
        self.lookup_only |= for_good
        self.marked_for_kill.pop(pid, None)
        peer = self.peers.get(role)
        if peer is None or peer.hello.pid != pid:
            return False
        del self.peers[role]
        self._forget(peer)
        return True

    def _forget(self, peer: Peer) -> None:
        self._by_address.pop(peer.address, None)
        self._budgets.pop(peer.address, None)
        self._working_on.pop(peer.address, None)
        self.hang_detector.forget(peer.address)

    def mark_for_kill(self, peer: Peer, reason: str) -> None:
        """Have the supervisor end this process."""
        _log.error("%s", reason)
        self.marked_for_kill.setdefault(peer.hello.pid, reason)
        if len(self.marked_for_kill) > _MOST_MARKED:
            del self.marked_for_kill[next(iter(self.marked_for_kill))]

    def find_hanging(self, now: float) -> list[tuple[Peer, str]]:
        """Return unmarked services that have been silent for too long, with the reason."""
        silent = [self._by_address[address] for address in self.hang_detector.update(now)]
        return [
            (peer, f"the {peer.hello.role} hangs: no sign of life for {seconds:.1f} s ({limit})")
            for peer in silent
            if peer.hello.pid not in self.marked_for_kill
            for seconds in [self.hang_detector.silent_s(peer.address)]
            for limit in [self.hang_detector.describe_limit(peer.address)]
        ]
