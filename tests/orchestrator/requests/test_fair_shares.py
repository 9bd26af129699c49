"""Places are shared by client, then by request: a model of time, without processes."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.requests.fair_shares import Claim, FairShares

STEP_S = 0.05


class House:
    """Sequences of given lengths that decode a token per step while they hold a place."""

    def __init__(self, places: int) -> None:
        self.shares, self.places = FairShares(places), places
        self.now = 0.0
        self.left: dict[Claim, int] = {}
        self.prefill: dict[Claim, int] = {}
        self.held: dict[Claim, None] = {}
        self.silent: dict[Claim, float] = {}
        """When each of them decoded last."""
        self._numbers = iter(range(1, 10**6))

    def ask(self, client: str, group: int, tokens: int, *, n: int = 1, prompt: int = 0) -> None:
        for _ in range(n):
            claim = Claim(next(self._numbers), (client.startswith("background"), client), group)
            self.left[claim], self.prefill[claim] = tokens, prompt
            self.shares.add(claim)

    def step(self) -> None:
        for _ in range(64):
            while self.shares.has_place and (claim := self.shares.find_next()) is not None:
                self.shares.grant(claim, self.now)
                self.held[claim] = None
            if (victim := self.shares.find_victim(self.now)) is None:
                break
            if not self.shares.park(victim):
                self.give_up(victim)
        assert len(self.held) <= 8 * self.places
        assert not self.shares.has_place or self.shares.find_next() is None
        self.now += STEP_S
        for claim in list(self.held):
            self.decode(claim)

    def serve(self, client: str, group: int, tokens: int) -> float:
        """Let a request come and be answered; the longest time that it had to wait for a token."""
        self.ask(client, group, tokens)
        claim = next(claim for claim in self.left if claim.group == group)
        self.silent[claim], worst = self.now, 0.0
        while claim in self.left:
            self.step()
            worst = max(worst, self.now - self.silent[claim])
        return worst

    def decode(self, claim: Claim) -> None:
        if self.prefill[claim] > 0:
            self.prefill[claim] -= 1
            return
        if not self.shares.on_tokens(claim.number, self.now):
            self.give_up(claim)
        self.left[claim] -= 1
        self.silent[claim] = self.now
        if not self.left[claim]:
            del self.left[claim]
            self.held.pop(claim, None)
            self.shares.remove(claim)

    def give_up(self, claim: Claim) -> None:
        self.held.pop(claim, None)
        self.shares.give_up(claim)


def test_a_request_for_many_answers_does_not_keep_others_waiting() -> None:
    """Eight times sixteen long answers hold all places; one that comes then is served at once."""
    house = House(4)
    for group in range(8):
        house.ask("crowd", group, 8000, n=16)
    for _ in range(40):
        house.step()
    assert house.serve("crowd", 99, 40) < 2.0


def test_clients_share_before_requests_do() -> None:
    """Twelve requests of one client and one of another: each client decodes half of the time."""
    house = House(1)
    for group in range(12):
        house.ask("many", group, 10**6)
    house.ask("one", 1, 10**6, n=8)
    decoded: Counter[str] = Counter()
    for _ in range(600):
        house.step()
        decoded.update(claim.client[1] for claim in house.held)
    assert 0.4 < decoded["one"] / decoded.total() < 0.6


def test_a_crowd_is_served_in_few_rounds() -> None:
    """Sixty long answers on four places: one that comes later waits for two seconds at most."""
    house = House(4)
    for group in range(60):
        house.ask("crowd", group, 8000)
    for _ in range(40):
        house.step()
    assert house.serve("crowd", 99, 40) < 2.0


def test_places_that_are_free_are_used_by_one() -> None:
    """Alone, a request for many answers holds all places, and gives up none of them."""
    house = House(4)
    house.ask("a", 1, 100, n=16)
    house.step()
    before = list(house.held)
    for _ in range(50):
        house.step()
    assert list(house.held) == before
    assert [claim.number for claim in before] == [1, 2, 3, 4]


def test_background_requests_yield() -> None:
    """They give up their places to anybody else at once, and get none while others wait."""
    house = House(2)
    house.ask("background", 1, 50, n=4)
    house.step()
    house.ask("a", 1, 60, n=4)
    house.step()
    assert {claim.client[1] for claim in house.held} == {"a"}
    while any(claim.client[1] == "a" for claim in house.left):
        house.step()
    house.step()
    assert {claim.client[1] for claim in house.held} == {"background"}


def test_long_prompts_give_up_places_and_are_computed_all_the_same() -> None:
    """What computes its prompt when its time is over goes on without a place."""
    house = House(2)
    for group in range(6):
        house.ask("crowd", group, 10, prompt=200)
    for _ in range(20):
        house.step()
    assert house.serve("crowd", 99, 40) < 2.5
    for _ in range(3000):
        house.step()
    assert not house.left


_ASKS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "background c"]),
        st.integers(1, 4),
        st.integers(1, 30),
        st.integers(1, 4),
        st.integers(0, 30),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), _ASKS)
def test_everybody_is_served(places: int, asks: list[tuple[str, int, int, int, int, int]]) -> None:
    """Whatever comes when, all of it ends; no place is idle while anybody waits for one."""
    house = House(places)
    for client, group, tokens, n, prompt, pause in asks:
        house.ask(client, group, tokens, n=n, prompt=prompt)
        for _ in range(pause):
            house.step()
    for _ in range(200 * 5 * 12):
        if not house.left:
            break
        house.step()
    assert not house.left
    assert house.shares.find_next() is None
