"""One request that goes wrong costs nobody else anything: no processes, no sockets."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.requests.crash_journal import CrashJournal, fingerprint
from orchestrator.requests.request import Request
from protocol.messages import (
    CloseSequence,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    LogitsOptions,
    OpenSequence,
    Rejected,
    Role,
    Sampling,
    ServiceDown,
    Text,
    VerificationOutcome,
    Verify,
)
from tests.orchestrator.test_registry import changed
from tests.orchestrator.test_server import DRAFTER, VERIFIER, FakePoller, FakeTokenizer, House
from tests.properties import examples

POISON = 13


class Poisonous(FakeTokenizer):
    """The library raises for one token, as tokenizers' `DecodeStream` did."""

    def push(self, token: int) -> str:
        if token == POISON:
            raise Exception("Invalid prefix encountered while decoding stream")  # noqa: TRY002
        return super().push(token)


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.server.Poller", FakePoller)


def house_of(count: int, *, mode: str = "ar", **settings: Any) -> House:
    """As many requests as this run at once."""
    house = House(concurrency=count, **settings)
    house.service(b"v", VERIFIER)
    house.service(b"d", DRAFTER)
    for number in range(1, count + 1):
        house.client(ask(number, mode=mode))
    return house


def ask(number: int, **fields: Any) -> Generate:
    return Generate(request=number, tokens=[1, 2, 3], **{"max_tokens": 99, "mode": "ar", **fields})


def emit(house: House, sequence: int, token: int, verifier: bytes = b"v") -> None:
    """The verifier answers the last `Verify` of this sequence."""
    verify = [v for v in house.told(verifier, Verify) if v.sequence == sequence][-1]
    house.service(
        verifier,
        VerificationOutcome(
            sequence=sequence, round=verify.round, accepted=0, bonus=token, verify_ms=5, idle_ms=0.1
        ),
    )


def ends(house: House) -> list[tuple[int, str, str]]:
    return [
        (finished.request, finished.reason, finished.error)
        for finished in house.told(b"c", Finished)
    ]


def dies(house: House, role: Role, hello: Hello) -> None:
    house.client(ServiceDown(role=role, pid=hello.pid, reason="signal 11", final=False))


def opened(house: House, peer: bytes) -> list[int]:
    return [message.sequence for message in house.told(peer, OpenSequence)]


# ---------------------------------------------------------------- exceptions


def test_an_exception_of_the_detokeniser_ends_its_request() -> None:
    """It is told so; the other goes on with its tokens."""
    house = house_of(2, tokenizer=Poisonous())
    emit(house, 1, 5)
    emit(house, 2, 6)
    emit(house, 1, POISON)
    [(number, reason, error)] = ends(house)
    assert (number, reason) == (1, "error")
    assert "Invalid prefix" in error
    emit(house, 2, 7)
    tokens = [text.tokens for text in house.told(b"c", Text) if text.request == 2]
    assert tokens == [[6], [7]]
    assert CloseSequence(sequence=1) in house.told(b"v", CloseSequence)


def test_even_an_end_that_cannot_be_computed_reaches_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then it is a rejection, and the next request has the place."""
    house = house_of(1)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("statistics")

    monkeypatch.setattr(Request, "last_messages", fail)
    house.client(ask(2))
    emit(house, 1, 99)  # a stop token
    [rejected] = house.told(b"c", Rejected)
    assert (rejected.request, rejected.kind) == (1, "unavailable")
    assert "statistics" in rejected.reason
    assert opened(house, b"v") == [1, 2]


def test_an_exception_in_admission_rejects_the_request() -> None:
    """A tokenizer that raises is the request's affair."""

    class Broken(FakeTokenizer):
        def encode_prompt(self, prompt: Any) -> list[int]:
            raise RuntimeError("PanicException")

    house = House(tokenizer=Broken())
    house.service(b"v", VERIFIER)
    house.client(Generate(request=1, text="hello"))
    [rejected] = house.told(b"c", Rejected)
    assert (rejected.request, rejected.kind) == (1, "invalid")
    assert "PanicException" in rejected.reason
    house.client(ask(2))
    assert opened(house, b"v") == [1]


# ---------------------------------------------------------------- deaths of services


def test_a_request_of_which_the_verifier_dies_twice_is_ended() -> None:
    """All are tried alone after the first death; the innocent go on with the same tokens."""
    house = house_of(3)
    for number in (1, 2, 3):
        emit(house, number, 5)
    dies(house, "verifier", VERIFIER)
    house.service(b"w", changed(VERIFIER, pid=21))
    assert opened(house, b"w") == [1]  # alone
    for _ in range(15):
        emit(house, 1, 6, b"w")
    assert opened(house, b"w") == [1]
    emit(house, 1, 6, b"w")
    assert opened(house, b"w") == [1, 2]  # it got well beyond: the next
    dies(house, "verifier", changed(VERIFIER, pid=21))
    [(number, reason, error)] = ends(house)
    assert (number, reason) == (2, "error")
    assert "the verifier died 2 times" in error
    house.service(b"x", changed(VERIFIER, pid=22))
    assert opened(house, b"x") == [3]
    for _ in range(20):
        emit(house, 3, 7, b"x")
    assert opened(house, b"x") == [3, 1]
    [again] = [opened for opened in house.told(b"x", OpenSequence) if opened.sequence == 1]
    assert again.tokens == [1, 2, 3, 5, *[6] * 15]


def test_the_one_that_the_verifier_named_is_tried_first() -> None:
    """A heartbeat says what was being worked on."""
    house = house_of(3)
    house.service(b"v", Heartbeat(sequence=2))
    dies(house, "verifier", VERIFIER)
    house.service(b"w", changed(VERIFIER, pid=21))
    assert opened(house, b"w") == [2]


def test_new_requests_wait_for_the_suspects() -> None:
    """What arrives meanwhile is not put beside a suspect, and starts when it is cleared."""
    house = House(concurrency=4)
    house.service(b"v", VERIFIER)
    house.client(ask(1))
    dies(house, "verifier", VERIFIER)
    house.client(ask(2))
    house.service(b"w", changed(VERIFIER, pid=21))
    house.client(ask(3))
    assert opened(house, b"w") == [1]
    for _ in range(16):
        emit(house, 1, 6, b"w")
    assert opened(house, b"w") == [1, 2, 3]


def test_a_copy_of_a_request_that_a_verifier_died_of_is_refused() -> None:
    """It is ended after two deaths, and never reaches the third verifier; others do."""
    house = house_of(1)
    dies(house, "verifier", VERIFIER)
    house.service(b"w", changed(VERIFIER, pid=21))
    dies(house, "verifier", changed(VERIFIER, pid=21))
    [(number, reason, error)] = ends(house)
    assert (number, reason) == (1, "error")
    assert "max_deaths" in error
    house.service(b"x", changed(VERIFIER, pid=22))
    house.client(ask(2))
    [rejected] = house.told(b"c", Rejected)
    assert (rejected.request, rejected.kind) == (2, "invalid")
    assert "max_deaths" in rejected.reason
    house.client(ask(3, max_tokens=98))
    assert opened(house, b"x") == [2]


def test_deaths_far_apart_end_nothing() -> None:
    """A verifier that is killed now and then costs no request its answer."""
    house = house_of(1)
    peers = [b"v", b"v1", b"v2", b"v3", b"v4"]
    for death, (peer, successor) in enumerate(pairwise(peers)):
        for _ in range(18):
            emit(house, 1, 6, peer)
        dies(house, "verifier", changed(VERIFIER, pid=VERIFIER.pid if not death else 20 + death))
        house.service(successor, changed(VERIFIER, pid=21 + death))
    assert ends(house) == []


def test_a_request_of_which_drafters_die_goes_on_without() -> None:
    """Its answer is the same without one, so it is not ended."""
    house = house_of(1, mode="ssd")
    assert opened(house, b"d") == [1]
    dies(house, "drafter", DRAFTER)
    house.service(b"e", changed(DRAFTER, pid=31))
    assert opened(house, b"e") == [1]
    dies(house, "drafter", changed(DRAFTER, pid=31))
    house.service(b"f", changed(DRAFTER, pid=32))
    assert opened(house, b"f") == []
    emit(house, 1, 5)
    assert ends(house) == []
    house.client(ask(2, mode="ssd"), peer=b"other")
    assert [text.tokens for text in house.told(b"c", Text)] == [[5]]


# ---------------------------------------------------------------- deaths of the orchestrator


def test_a_request_that_ended_the_orchestrator_twice_is_refused(tmp_path: Path) -> None:
    """Its client is told; another request is served."""
    for _ in range(2):
        CrashJournal(tmp_path, 2).enter(fingerprint(ask(1)), 7)
    house = House(journal=CrashJournal(tmp_path, 2))
    house.service(b"v", VERIFIER)
    house.client(ask(1))
    [rejected] = house.told(b"c", Rejected)
    assert (rejected.kind, rejected.request) == ("invalid", 1)
    assert "max_deaths" in rejected.reason
    house.client(ask(2, max_tokens=98))
    assert opened(house, b"v") == [1]


def test_a_copy_of_a_request_that_killed_a_service_is_refused_for_a_while() -> None:
    """Clients repeat what fails, with a seed that was drawn anew; later it may be tried again."""
    now = [1000.0]
    journal = CrashJournal(None, 2, lambda: now[0])
    seeded = Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2)
    original, copy = (ask(number, sampling=sampling) for number, sampling in enumerate(seeded, 1))
    assert not journal.is_guilty(fingerprint(original))
    journal.ban(fingerprint(original))
    assert journal.is_guilty(fingerprint(copy))
    assert not journal.is_guilty(fingerprint(ask(3, sampling=Sampling())))
    now[0] += 3600.0
    assert not journal.is_guilty(fingerprint(copy))


def test_the_request_at_hand_is_named_while_it_is_at_hand(tmp_path: Path) -> None:
    """In the middle of its text, and no longer after it."""
    sequences = []

    class Watching(FakeTokenizer):
        def push(self, token: int) -> str:
            sequences.append((tmp_path / "at_work").read_bytes())
            return super().push(token)

    house = house_of(1, tokenizer=Watching(), journal=CrashJournal(tmp_path, 2))
    emit(house, 1, 5)
    assert [at_work[:16] for at_work in sequences] == [fingerprint(ask(1))]
    assert (tmp_path / "at_work").read_bytes() == bytes(20)


REQUESTS = st.builds(
    Generate,
    request=st.integers(1, 5),
    tokens=st.lists(st.integers(0, 200), max_size=5),
    text=st.text(max_size=9),
    max_tokens=st.integers(1, 2**40),
    stop=st.lists(st.text(max_size=80), max_size=70),
    mode=st.sampled_from(["ar", "sd", "ssd"]),
    num_draft_tokens=st.integers(0, 64),
    branches=st.integers(0, 256),
    template_options=st.dictionaries(st.text(max_size=3), st.none(), max_size=1),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, 100),
        top_p=st.floats(0, 1, exclude_min=True),
        acceptance=st.sampled_from(["coupled", "rejection"]),
        saguaro=st.floats(0, 1, exclude_min=True),
        logits_options=st.none()
        | st.builds(
            LogitsOptions,
            logit_bias=st.lists(
                st.tuples(st.integers(0, 300), st.floats(-100, 100)), max_size=3
            ).map(tuple),
            repetition_penalty=st.floats(0.1, 10),
        ),
    ),
    count_only=st.booleans(),
    trace=st.booleans(),
)


@examples(100)
@given(st.lists(REQUESTS, min_size=1, max_size=4), st.integers(0, 99))
@pytest.mark.wide
def test_any_request_is_served_or_refused(requests: list[Generate], token: int) -> None:
    """Whatever it says, the orchestrator goes on, and serves an ordinary one after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestrator.server.Poller", FakePoller)
        house = House(concurrency=9, max_stop_strings=64)
        house.service(b"v", VERIFIER)
        house.service(b"d", DRAFTER)
        for index, request in enumerate(requests):
            # Template options go to a worker process, which is another test's.
            plain = changed_request(request, index + 1)
            house.client(plain)
            heard = house.told(b"c", Rejected) + house.told(b"c", Finished)
            served = len(opened(house, b"v"))
            assert len(heard) + served >= index + 1
            if served:
                emit(house, opened(house, b"v")[-1], token)
        house.client(ask(77))
        assert len(house.told(b"c", Rejected)) <= len(requests)
        assert house.told(b"v", OpenSequence)[-1].tokens == [1, 2]


def changed_request(request: Generate, number: int) -> Generate:
    return msgspec.structs.replace(request, request=number, template_options={})
