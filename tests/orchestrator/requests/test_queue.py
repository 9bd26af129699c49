"""The line of requests, and the orchestrator's loop with several of them, without processes."""

from typing import Any

import msgspec
import pytest

from orchestrator.requests.queue import RequestQueue
from protocol.messages import (
    Cancel,
    CloseSequence,
    Finished,
    Generate,
    OpenSequence,
    Prefilled,
    Rejected,
    Status,
    StatusRequest,
    Text,
    Verify,
)
from tests.orchestrator.test_server import DRAFTER, VERIFIER, FakePoller, House, outcome_of


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.server.Poller", FakePoller)


def house_of(kv_tokens: int = 0, **settings: Any) -> House:
    house = House(**settings)
    house.service(b"v", msgspec.structs.replace(VERIFIER, kv_tokens=kv_tokens))
    house.service(b"d", DRAFTER)
    return house


def ask(request: int, tokens: int = 3, **fields: Any) -> Generate:
    return Generate(request=request, tokens=[1] * tokens, mode="ar", **fields)


def running(house: House) -> list[int]:
    """The sequences that are open at the verifier, in the order in which they were opened."""
    opened = [m.sequence for m in house.told(b"v", OpenSequence)]
    closed = {m.sequence for m in house.told(b"v", CloseSequence)}
    return [number for number in opened if number not in closed]


def verified(house: House, sequence: int, bonus: int) -> None:
    verify = [m for m in house.told(b"v", Verify) if m.sequence == sequence][-1]
    house.service(b"v", outcome_of(verify, bonus=bonus, sequences=2, rows=2))


def test_background_requests_are_overtaken() -> None:
    """By those that somebody waits for; among themselves all keep their order."""
    house = house_of(concurrency=1)
    for request, background in ((1, True), (2, True), (3, False), (4, True), (5, False)):
        house.client(ask(request, max_tokens=1, is_background=background))
    for sequence in (1, 3, 5, 2, 4):
        verified(house, sequence, 5)
    assert [finished.request for finished in house.told(b"c", Finished)] == [1, 3, 5, 2, 4]


def test_as_many_run_as_may() -> None:
    """So many requests are decoded at a time; when one ends, the next in line begins."""
    house = house_of(concurrency=2)
    for request in (1, 2, 3, 4):
        house.client(ask(request, max_tokens=1))
    assert running(house) == [1, 2]
    house.client(StatusRequest())
    (status,) = house.told(b"c", Status)
    assert (status.active, status.waiting) == (2, 2)
    verified(house, 2, 5)
    assert running(house) == [1, 3]
    verified(house, 3, 6)
    assert running(house) == [1, 4]
    assert [finished.request for finished in house.told(b"c", Finished)] == [2, 3]


def test_each_request_gets_its_own_tokens() -> None:
    """Outcomes that come in any order go to the client and request that they belong to."""
    house = house_of(concurrency=2)
    house.client(ask(7, max_tokens=2), peer=b"c")
    house.client(ask(7, max_tokens=2), peer=b"e")
    for sequence, bonus in ((2, 20), (1, 10), (1, 11), (2, 21)):
        verified(house, sequence, bonus)
    for peer, expected in ((b"c", [10, 11]), (b"e", [20, 21])):
        assert [t for text in house.told(peer, Text) for t in text.tokens] == expected
        assert [f.reason for f in house.told(peer, Finished)] == ["length"]


def test_requests_wait_for_room_in_the_kv() -> None:
    """A request begins when its longest answer fits; nobody who came later overtakes it."""
    house = house_of(kv_tokens=40, concurrency=8)
    house.client(ask(1, max_tokens=17))  # 20 tokens
    house.client(ask(2, max_tokens=20))  # 23: too many beside the first
    house.client(ask(3, max_tokens=2))
    assert running(house) == [1]
    house.client(Cancel(request=1))
    assert running(house) == [2, 3]


def test_what_never_fits_runs_alone_and_ends_with_the_memory() -> None:
    """An answer that may be longer than the KV is given all of it, and ends as a full context."""
    house = house_of(kv_tokens=5, concurrency=8)
    house.client(ask(1, max_tokens=100))
    house.client(ask(2, max_tokens=1))
    assert running(house) == [1]
    verified(house, 1, 5)
    verified(house, 1, 6)
    assert [f.reason for f in house.told(b"c", Finished)] == ["context"]
    assert running(house) == [2]
    house.client(ask(3, tokens=5))
    (refusal,) = house.told(b"c", Rejected)
    assert (refusal.kind, refusal.request) == ("invalid", 3)


def test_kinds_of_refusal() -> None:
    """A full line is busy, a lost verifier unavailable: both say which request they mean."""
    house = house_of(concurrency=1, max_waiting=1)
    for request in (1, 2, 3):
        house.client(ask(request))
    (refusal,) = house.told(b"c", Rejected)
    assert (refusal.kind, refusal.request) == ("busy", 3)


@pytest.mark.parametrize("request_", [1, 2])
def test_cancelling_frees_at_once(request_: int) -> None:
    """Running or waiting: both services forget the sequence, and the next one begins."""
    house = house_of(concurrency=1)
    for request in (1, 2):
        house.client(ask(request))
    house.client(Cancel(request=request_))
    assert [(f.request, f.reason) for f in house.told(b"c", Finished)] == [(request_, "cancelled")]
    assert running(house) == [3 - request_]


def test_cached_tokens_are_told() -> None:
    """What the target had of the prompt is reported, once, and not what a restart found."""
    house = house_of()
    house.client(ask(1, tokens=9, max_tokens=1))
    for cached in (6, 8):
        house.service(b"v", Prefilled(sequence=1, length=8, prefill_ms=1.0, cached=cached))
    house.service(b"d", Prefilled(sequence=1, length=8, prefill_ms=1.0, cached=2))
    verified(house, 1, 5)
    (finished,) = house.told(b"c", Finished)
    assert finished.cached_tokens == 6


def test_an_empty_line() -> None:
    """Nobody is there, nobody starts, nobody is found."""
    requests = RequestQueue(1, 1)
    assert list(requests) == list(requests.start(0, 0.0)) == []
    assert requests.find(b"c", 1) is None
    assert requests.find_victim(0, 0.0) is None
    assert not requests.is_full([], ("a", 1))


def test_a_request_for_many_answers_makes_room() -> None:
    """Its sequences are put aside for others, and go on from their tokens: nothing is lost."""
    house = house_of(concurrency=2)
    for request in (1, 2, 3):
        house.client(ask(request, max_tokens=4, client="crowd", group=7))
    assert running(house) == [1, 2]
    verified(house, 2, 20)
    house.client(ask(9, max_tokens=1, client="crowd", group=8))
    assert running(house) == [1, 2, 4]
    verified(house, 2, 21)  # it was under way
    verify_count = len(house.told(b"v", Verify))
    house.client(StatusRequest())
    status = house.told(b"c", Status)[-1]
    assert (status.active, status.waiting) == (2, 2)
    assert len(house.told(b"v", Verify)) == verify_count
    verified(house, 4, 5)
    for bonus in (22, 23):
        verified(house, 2, bonus)
    texts = [text.tokens for text in house.told(b"c", Text) if text.request == 2]
    assert texts == [[20], [21], [22], [23]]
    assert [f.request for f in house.told(b"c", Finished)] == [9, 2]
    assert len([m for m in house.told(b"v", OpenSequence) if m.sequence == 2]) == 1


def test_who_waits_gives_its_memory_to_others() -> None:
    """A sequence that is put aside is closed if the next one has no room else; nothing is lost."""
    house = house_of(kv_tokens=20, concurrency=1)
    house.client(ask(1, max_tokens=9, is_background=True))
    verified(house, 1, 30)
    house.client(ask(2, max_tokens=1))
    assert running(house) == [1, 2]  # both fit
    verified(house, 1, 31)  # it was under way
    house.client(ask(3, max_tokens=9))
    late = [m for m in house.told(b"v", Verify) if m.sequence == 1][-1]
    verified(house, 2, 5)
    assert running(house) == [3]
    house.service(b"v", outcome_of(late, bonus=99, sequences=1, rows=1))
    for bonus in range(9):
        verified(house, 3, bonus)
    opened = [m.tokens for m in house.told(b"v", OpenSequence) if m.sequence == 1]
    assert opened == [[1, 1], [1, 1, 1, 30]]
    for bonus in range(32, 39):
        verified(house, 1, bonus)
    texts = [t for text in house.told(b"c", Text) if text.request == 1 for t in text.tokens]
    assert texts == [*range(30, 39)]


def test_a_full_line_counts_requests() -> None:
    """All answers to one request take one place in line; another client's request is another."""
    house = house_of(concurrency=1, max_waiting=2)
    for request in range(1, 10):
        house.client(ask(request, client="a", group=1))
    house.client(ask(20, client="a", group=2))
    assert not house.told(b"c", Rejected)
    house.client(ask(21, client="b", group=1))
    assert [refusal.request for refusal in house.told(b"c", Rejected)] == [21]
