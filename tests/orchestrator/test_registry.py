"""The handshake's judgement: who may join, and the sentence for who may not."""

from typing import Any

import msgspec
import pytest

from orchestrator.hang_detector import HangDetector
from orchestrator.registry import Peer, Registry, handshake_error
from protocol.decoding.vocabulary import Vocabulary
from protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    PassTimes,
    PreparationState,
    Prepared,
    Role,
)

TARGET = Vocabulary("f00d", 1000)
DRAFTER = Hello(
    protocol=PROTOCOL_VERSION,
    role="drafter",
    pid=7,
    backend="mlx",
    model="/models/small",
    tokenizer_fingerprint="f00d",
    vocabulary_size=1000,
    context_length=2048,
    compute_unit="cpu",
    max_draft_tokens=64,
)
VERIFIER = msgspec.structs.replace(DRAFTER, role="verifier", pid=8, model="/models/large")


def changed(hello: Hello, **fields: Any) -> Hello:
    return msgspec.structs.replace(hello, **fields)


@pytest.mark.parametrize("hello", [DRAFTER, VERIFIER], ids=lambda h: h.role)
def test_a_fitting_service_may_join(hello: Hello) -> None:
    """The same protocol and the same vocabulary raise no objection."""
    assert handshake_error(hello, TARGET) is None


def test_padded_heads_do_not_matter() -> None:
    """Equal maps fit whatever size the service names beside them."""
    assert handshake_error(changed(DRAFTER, vocabulary_size=1024), TARGET) is None


@pytest.mark.parametrize("hello", [DRAFTER, VERIFIER], ids=lambda h: h.role)
@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION + 1])
def test_another_protocol_is_refused(hello: Hello, protocol: int) -> None:
    """The sentence names both versions and says what to do."""
    sentence = handshake_error(changed(hello, protocol=protocol), TARGET)
    expected = (
        f"the {hello.role} speaks protocol version {protocol} and the orchestrator "
        f"{PROTOCOL_VERSION}; start all processes from the same installation"
    )
    assert expected == sentence


def test_another_protocol_is_the_first_objection() -> None:
    """With another protocol, what else the service says may mean something else."""
    sentence = handshake_error(changed(DRAFTER, protocol=9, tokenizer_fingerprint="beef"), TARGET)
    assert sentence is not None
    assert "protocol version 9" in sentence


@pytest.mark.parametrize("hello", [DRAFTER, VERIFIER], ids=lambda h: h.role)
def test_another_vocabulary_size_is_refused(hello: Hello) -> None:
    """The sentence names the model and both sizes."""
    other = changed(hello, tokenizer_fingerprint="beef", vocabulary_size=999)
    expected = (
        f"the {hello.role} model {hello.model!r} has a vocabulary of 999 tokens and the target "
        "one of 1000; a pair must share its tokenizer"
    )
    assert expected == handshake_error(other, TARGET)


@pytest.mark.parametrize("hello", [DRAFTER, VERIFIER], ids=lambda h: h.role)
def test_another_numbering_is_refused(hello: Hello) -> None:
    """The same size does not make the same vocabulary, and the sentence says so."""
    expected = (
        f"the {hello.role} model {hello.model!r} numbers its 1000 tokens differently from the "
        "target; a pair must share its tokenizer"
    )
    assert expected == handshake_error(changed(hello, tokenizer_fingerprint="beef"), TARGET)


def test_a_drafter_needs_no_model() -> None:
    """A drafter without a tokenizer looks tokens up; a verifier without one is none."""
    nothing = {"model": "", "tokenizer_fingerprint": "", "vocabulary_size": 0}
    assert handshake_error(changed(DRAFTER, **nothing), TARGET) is None
    assert handshake_error(changed(VERIFIER, **nothing), TARGET) == "the verifier has no tokenizer"


def test_peers_are_found_by_address() -> None:
    """A message is attributed to the current service of its address, and to no other."""
    registry = Registry(HangDetector(20.0, 180.0))
    drafter, verifier = Peer(b"d", DRAFTER), Peer(b"v", VERIFIER)
    assert registry.add(drafter) is None
    assert registry.add(verifier) is None
    assert [drafter, verifier, None] == [
        registry.find(b"d"),
        registry.find(b"v"),
        registry.find(b"x"),
    ]


def test_a_newcomer_replaces_the_service_of_its_role() -> None:
    """Adopting returns the service that was replaced, which is unknown from then on."""
    registry = Registry(HangDetector(20.0, 180.0))
    old, new = Peer(b"old", DRAFTER), Peer(b"new", changed(DRAFTER, pid=9))
    registry.add(old)
    assert old is registry.add(new)
    assert registry.find(b"old") is None
    assert new is registry.find(b"new")


def test_a_welcome_ends_the_refusal_of_its_role() -> None:
    """Why a candidate was refused is remembered until one of its role is welcomed."""
    registry = Registry(HangDetector(20.0, 180.0))
    registry.rejected.update(drafter="no", verifier="never")
    registry.add(Peer(b"d", DRAFTER))
    assert registry.rejected == {"verifier": "never"}


@pytest.mark.parametrize(
    ("role", "pid", "expected"),
    [("drafter", 7, True), ("drafter", 6, False), ("verifier", 7, False)],
)
def test_only_the_current_service_can_die(role: Role, pid: int, expected: bool) -> None:  # noqa: FBT001
    """News of the death of a service that was replaced does not drop its successor."""
    registry = Registry(HangDetector(20.0, 180.0))
    registry.add(Peer(b"d", DRAFTER))
    assert expected is registry.remove(role, pid)
    assert expected is (registry.find(b"d") is None)


def test_what_a_service_has_prepared_replaces_what_its_hello_said() -> None:
    """It is not work: the first real pass may still take as long as a first one."""
    registry = Registry(HangDetector(5.0, 60.0))
    registry.add(Peer(b"v", VERIFIER))
    times, state = PassTimes(chains={1: 2.0}), PreparationState(done=1, total=2, stage="grammars")
    registry.on_message(b"v", Prepared(preparation=state, pass_times=times, takes_trees=True))
    peer = registry.peers["verifier"]
    assert registry.find(b"v") is peer
    assert peer.hello == changed(VERIFIER, preparation=state, pass_times=times, takes_trees=True)
    assert registry.hang_detector.limit_s(b"v") == 60.0
