"""What a drafter may send, and what becomes of one that sends more: no processes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.message_budget import MessageBudget
from orchestrator.sequence.limits import Limits
from protocol.messages import (
    END_OF_BRANCH,
    DraftNow,
    DraftTree,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Prepare,
    Status,
    StatusRequest,
    Verify,
)
from protocol.transport.channel import STRANGER_BYTES
from protocol.transport.codec import MAX_MESSAGE_BYTES, encode
from tests.orchestrator.test_registry import changed
from tests.orchestrator.test_server import DRAFTER, VERIFIER, FakePoller, House
from tests.properties import examples
from tests.support.fakes import Stack, Target

PREPARE = Prepare(
    sequence=1, round=1, base=0, tokens=[], nodes=[1, 2], fan_out=[2, 2], depth=3, held_back=1
)


def tree(**fields: Any) -> DraftTree:
    defaults = {
        "sequence": 1, "round": 1, "depth": 1, "outcomes": [(0, 5)], "tokens": [6],
        "confidences": [0.5], "draft_ms": 1.0,
    }  # fmt: skip
    return DraftTree(**{**defaults, **fields})


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.server.Poller", FakePoller)


def house_of_one() -> House:
    house = House()
    house.service(b"v", VERIFIER)
    house.service(b"d", DRAFTER)
    house.client(Generate(request=1, tokens=[1, 2, 3], mode="ssd", max_tokens=99))
    return house


def marked(house: House) -> dict[int, str]:
    house.client(StatusRequest())
    return house.told(b"c", Status)[-1].marked_for_kill


def test_what_was_asked_for_is_never_too_much() -> None:
    """A drafter that answers everything, for hours and in bursts, keeps its credit."""
    budget = MessageBudget()
    for second in range(5000):
        for _ in range(30):
            budget.on_sent(PREPARE)
            assert all(budget.spend(float(second)) for _ in range(PREPARE.depth))
        assert budget.spend(float(second))


def test_a_flood_is_too_much() -> None:
    """A hundred messages per second that answer nothing."""
    budget = MessageBudget()
    assert 500 < next(n for n in range(999) if not budget.spend(n / 100)) < 600


def test_a_draft_that_was_asked_for_adds_its_depths() -> None:
    """Of a `DraftNow` one message per token may come."""
    budget = MessageBudget()
    while budget.spend(0.0):
        pass
    budget.on_sent(DraftNow(sequence=1, round=2, base=0, tokens=[], pending=3, accepted=0, count=9))
    assert sum(budget.spend(0.0) for _ in range(50)) == 10


@pytest.mark.parametrize(
    "unasked",
    [
        tree(round=99),
        tree(depth=40, outcomes=[]),
        tree(outcomes=[(0, t) for t in range(300)], tokens=[1] * 300, confidences=[0.5] * 300),
        tree(outcomes=[(7, 5)]),
    ],
    ids=["a later round", "too deep", "too wide", "a longer chain"],
)
def test_trees_nobody_asked_for_cost_their_sender(unasked: DraftTree) -> None:
    """The drafter is left and marked, the request goes on plainly, and ends as it should."""
    house = house_of_one()
    house.service(b"d", unasked)
    assert marked(house) == {}
    for _ in range(600):
        house.service(b"d", unasked)
    assert list(marked(house)) == [DRAFTER.pid]
    assert "more than it was asked for" in marked(house)[DRAFTER.pid]
    while not house.told(b"c", Finished):
        house.verified(0, 7)
    assert house.told(b"c", Finished)[0].reason == "length"
    house.service(b"e", changed(DRAFTER, pid=99))  # the next one takes over
    house.client(Generate(request=2, tokens=[1, 2, 3], mode="ssd"))
    assert house.told(b"e", Prepare)


def test_a_flood_does_not_keep_the_verifier_or_clients_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One turn of the loop reads messages of one side for a limited time."""
    monkeypatch.setattr("orchestrator.message_budget._TURN_S", 0.0)
    house = house_of_one()
    lengths: list[int] = []
    house.services.inbox.extend((b"d", Heartbeat()) for _ in range(500))
    house.clients.inbox.append((b"c", StatusRequest(question=7)))
    send = house.clients.send

    def note(peer: bytes, message: Any) -> bool:
        lengths.append(len(house.services.inbox))
        return send(peer, message)

    house.clients.send = note  # type: ignore[method-assign]
    house.settle()
    assert lengths[0] > 400


def test_a_strangers_message_is_small() -> None:
    """Before the handshake nobody has anything long to say; after it a drafter little more."""
    house = house_of_one()
    limit_of = house.services.limit_of
    assert limit_of(b"x") == STRANGER_BYTES > 20 * len(encode(DRAFTER))
    assert limit_of(b"x") < limit_of(b"d") < limit_of(b"v") == MAX_MESSAGE_BYTES
    widest = tree(
        outcomes=[(64, 2**31 - 1)] * 256, tokens=[2**31 - 1] * 256, confidences=[0.1] * 256
    )
    assert len(encode(widest)) < limit_of(b"d")


WIRES = st.builds(
    tree,
    round=st.integers(-2, 9),
    depth=st.integers(1, 40),
    outcomes=st.lists(st.tuples(st.integers(-2, 9), st.integers(0, 40)), max_size=9),
    tokens=st.lists(st.integers(END_OF_BRANCH, 40), max_size=9),
    confidences=st.lists(st.floats(0, 1), max_size=9),
    draft_ms=st.floats(0, 1e9),
    last=st.booleans(),
)


@examples(60)
@given(st.lists(WIRES, max_size=30), st.sampled_from(["sd", "ssd"]), st.integers(0, 255))
def test_no_tree_changes_an_answer(trees: list[DraftTree], mode: Any, salt: int) -> None:
    """Whatever a drafter sends, whenever: the tokens are those of plain decoding."""
    stack = Stack(
        mode=mode, target=Target(salt), prompt=[1, 2], limits=Limits(30, frozenset(), 0), skill=0.5
    )
    stack.verifier_comes()
    stack.drafter_comes()
    for depth in trees:
        stack.do(stack.sequence.on_tree(depth, stack.now))
        stack.calm_round()
    stack.calm().assert_plain()


def test_a_hello_is_not_budgeted() -> None:
    """A drafter that shakes hands again starts anew."""
    house = house_of_one()
    for _ in range(600):
        house.service(b"d", changed(DRAFTER))
    assert marked(house) == {}
    assert isinstance(DRAFTER, Hello)
    assert house.told(b"v", Verify)
