"""Which models are loaded: in time, within memory, never away from somebody who is answered."""

import pytest

from launch.serving.pool import (
    RETRY_S,
    ChangeDrafter,
    Grant,
    LoadModel,
    LocateModel,
    ModelPool,
    PoolAction,
    Refuse,
    UnloadModel,
)

GB = 10**9


class Pool:
    """A pool whose clock and machine are given; what it decides is carried out on request."""

    def __init__(self, *, budget: int = 10, idle: float = 0.0, free: int = 0) -> None:
        self.pool = ModelPool(idle_unload_s=idle, budget_bytes=budget * GB, timeout_s=60.0)
        self.now = 100.0
        self.free = free * GB
        self.busy: set[str] = set()

    def add(self, name: str, size: int, *, keep: bool = False) -> None:
        self.pool.add(name, f"default-{name}", keep_loaded=keep, memory_bytes=size * GB)

    def ask(self, name: str, use: str, drafter: str = "") -> list[PoolAction]:
        self.pool.request(name, use.encode(), drafter, self.now)
        return self.decide()

    def decide(self, after: float = 0.0) -> list[PoolAction]:
        self.now += after
        return self.pool.decide(self.now, self.free, self.busy)

    def load(self, name: str, use: str) -> None:
        """Ask for a model that is not there, until it is granted."""
        assert self.ask(name, use) == [LoadModel(name)]
        self.pool.on_loaded(name, 0, self.now)
        assert self.decide() == [Grant(name, use.encode())]

    def release(self, use: str) -> list[PoolAction]:
        self.pool.release(use.encode(), self.now)
        return self.decide()

    def state(self, name: str) -> str:
        return next(one.state for one in self.pool.describe() if one.name == name)


@pytest.fixture
def pool() -> Pool:
    """Three models of 4 GB, of which two fit."""
    made = Pool()
    for name in "abc":
        made.add(name, 4)
    return made


def test_a_model_is_loaded_when_it_is_asked_for(pool: Pool) -> None:
    """Once, however many ask; all of them are served when it is there."""
    assert pool.decide() == []
    assert pool.ask("a", "1") == [LoadModel("a")]
    assert pool.ask("a", "2") == []
    pool.pool.on_loaded("a", 0, pool.now)
    assert pool.decide() == [Grant("a", b"1"), Grant("a", b"2")]
    assert pool.ask("a", "3") == [Grant("a", b"3")]


def test_unknown_files_are_located_first() -> None:
    """Before their size is known there is no telling whether it fits."""
    pool = Pool()
    pool.pool.add("hub", "default-hub", keep_loaded=False)
    assert pool.ask("hub", "1") == [LocateModel("hub")]
    assert pool.decide() == []
    pool.pool.on_located("hub", 4 * GB)
    assert pool.decide() == [LoadModel("hub")]


def test_the_least_recently_used_makes_room(pool: Pool) -> None:
    """A model that is answered somebody stays, however long ago it was asked."""
    pool.load("a", "1")
    pool.now += 1
    pool.load("b", "2")
    pool.now += 1
    pool.release("2")
    pool.now += 1
    pool.release("1")
    assert pool.ask("c", "3") == [UnloadModel("b")]
    assert pool.decide() == []
    pool.pool.on_unloaded("b")
    assert pool.decide() == [LoadModel("c")]
    pool.pool.on_loaded("c", 0, pool.now)
    assert pool.decide() == [Grant("c", b"3")]
    assert pool.ask("b", "4") == [UnloadModel("a")]


def test_a_model_that_answers_is_never_unloaded(pool: Pool) -> None:
    """Who needs its room waits, and is told so in the end."""
    pool.load("a", "1")
    pool.load("b", "2")
    assert pool.ask("c", "3") == []
    assert pool.decide(after=59) == []
    [refused] = pool.decide(after=2)
    assert isinstance(refused, Refuse)
    assert (refused.use, refused.kind) == (b"3", "busy")
    assert "are all answering" in refused.reason
    assert pool.ask("c", "4") == []
    assert pool.release("1") == [UnloadModel("a")]


def test_others_of_the_machine_count_as_users(pool: Pool) -> None:
    """`ssd chat` uses a model without asking the server."""
    pool.load("a", "1")
    pool.load("b", "2")
    pool.release("1")
    pool.busy = {"a"}
    assert pool.ask("c", "3") == []
    pool.busy = set()
    assert pool.decide() == [UnloadModel("a")]


def test_nobody_waits_for_ever_for_room(pool: Pool) -> None:
    """A model that is asked again and again lets others have its room after a while."""
    pool.add("huge", 8)
    pool.load("a", "1")
    assert pool.ask("huge", "2") == []
    assert pool.ask("a", "3") == [Grant("a", b"3")]
    pool.now += 11
    assert pool.ask("a", "4") == []
    pool.release("1")
    assert pool.release("3") == [UnloadModel("a")]
    pool.pool.on_unloaded("a")
    assert pool.decide() == [LoadModel("huge")]
    pool.pool.on_loaded("huge", 0, pool.now)
    assert pool.decide() == [Grant("huge", b"2")]
    assert pool.release("2") == [UnloadModel("huge")]
    pool.pool.on_unloaded("huge")
    assert pool.decide() == [LoadModel("a")]


def test_what_cannot_fit_is_refused_at_once(pool: Pool) -> None:
    """With the figures; models that stay loaded are not counted as room."""
    pool.add("huge", 11)
    [refused] = pool.ask("huge", "1")
    assert isinstance(refused, Refuse)
    assert "'huge' needs about 11.0 GB" in refused.reason
    assert "at most 10.0 GB" in refused.reason
    pool.add("pinned", 4, keep=True)
    pool.add("large", 7)
    pool.load("pinned", "2")
    pool.release("2")
    [refused] = pool.ask("large", "3")
    assert isinstance(refused, Refuse)
    assert refused.kind == "unavailable"
    assert "at most 6.0 GB" in refused.reason


def test_without_a_budget_the_machine_decides() -> None:
    """What is free now, less what is just being loaded, and what unloading would free."""
    pool = Pool(budget=0, free=9)
    for name in "abc":
        pool.add(name, 4)
    assert pool.ask("a", "1") == [LoadModel("a")]
    assert pool.ask("b", "2") == [LoadModel("b")]
    assert pool.ask("c", "3") == []
    pool.pool.on_loaded("a", 0, pool.now)
    pool.pool.on_loaded("b", 0, pool.now)
    pool.free = 1 * GB
    assert pool.decide() == [Grant("a", b"1"), Grant("b", b"2")]
    assert pool.release("1") == [UnloadModel("a")]
    pool.pool.on_unloaded("a")
    pool.free = 5 * GB
    assert pool.decide() == [LoadModel("c")]


def test_an_idle_model_is_unloaded() -> None:
    """After the time that was set, counted from its last answer; not one that is kept."""
    pool = Pool(idle=300)
    pool.add("a", 4)
    pool.add("pinned", 4, keep=True)
    pool.load("a", "1")
    pool.load("pinned", "2")
    assert pool.decide(after=1000) == []
    pool.release("1")
    pool.release("2")
    assert pool.decide(after=299) == []
    assert pool.decide(after=2) == [UnloadModel("a")]
    assert pool.state("a") == "unloading"


def test_a_failure_is_told_and_tried_again_later(pool: Pool) -> None:
    """All who wait hear the reason; the others' models go on."""
    pool.load("b", "0")
    pool.ask("a", "1")
    pool.ask("a", "2")
    pool.pool.on_failed("a", "no such folder", pool.now)
    assert pool.decide() == [
        Refuse(b"1", "no such folder", "unavailable"),
        Refuse(b"2", "no such folder", "unavailable"),
    ]
    assert (pool.state("a"), pool.state("b")) == ("failed", "loaded")
    assert pool.ask("a", "3") == [Refuse(b"3", "no such folder", "unavailable")]
    pool.now += RETRY_S
    assert pool.ask("a", "4") == [LoadModel("a")]


def test_who_leaves_is_forgotten(pool: Pool) -> None:
    """While it waits, or while it is served; also when the whole gateway is gone."""
    pool.ask("a", "1")
    pool.release("1")
    pool.pool.on_loaded("a", 0, pool.now)
    assert pool.decide() == []
    pool.ask("a", "2")
    pool.pool.request("b", b"3", "", pool.now)
    pool.pool.release_all(pool.now)
    assert [(one.answering, one.waiting) for one in pool.pool.describe()] == [(0, 0)] * 3


def test_a_drafter_is_changed_between_answers(pool: Pool) -> None:
    """In the order of the requests; one that names none takes whichever runs."""
    pool.load("a", "1")
    assert pool.ask("a", "2", drafter="lookup") == []
    assert pool.ask("a", "3") == []
    assert pool.release("1") == [ChangeDrafter("a", "lookup")]
    assert list(pool.pool.on_drafter("a", "", pool.now)) == []
    assert pool.decide() == [Grant("a", b"2"), Grant("a", b"3")]
    pool.release("2")
    pool.release("3")
    assert pool.ask("a", "4", drafter="broken") == [ChangeDrafter("a", "broken")]
    [refused] = pool.pool.on_drafter("a", "no such model", pool.now)
    assert refused == Refuse(b"4", "no such model", "unavailable")
    assert pool.state("a") == "loaded"


def test_a_model_that_ends_while_its_drafter_is_changed_has_failed(pool: Pool) -> None:
    """What is then said of the drafter, late, does not make it a loaded one."""
    pool.load("a", "1")
    pool.release("1")
    assert pool.ask("a", "2", drafter="lookup") == [ChangeDrafter("a", "lookup")]
    pool.pool.on_ended("a")
    assert pool.ask("a", "3") == []
    pool.pool.on_failed("a", "it died", pool.now)
    assert list(pool.pool.on_drafter("a", "nobody answers", pool.now)) == []
    assert pool.state("a") == "failed"
    assert pool.decide() == [
        Refuse(b"2", "it died", "unavailable"),
        Refuse(b"3", "it died", "unavailable"),
    ]


def test_what_is_cleared_away_is_neither_used_nor_unloaded(pool: Pool) -> None:
    """A model that has ended by itself: its room is not free yet, and nobody is sent to it."""
    pool.load("a", "1")
    pool.load("b", "2")
    pool.release("1")
    pool.pool.on_ended("a")
    assert pool.ask("a", "3") == []
    assert pool.ask("c", "4") == []
    pool.pool.on_failed("a", "it died", pool.now)
    assert pool.decide() == [Refuse(b"3", "it died", "unavailable"), LoadModel("c")]


def test_a_line_that_is_too_long_is_closed() -> None:
    """A model that loads for long: who came last is told to come again, and the others wait."""
    pool = Pool()
    pool.pool.add("a", "default-a", keep_loaded=False, memory_bytes=4 * GB, most_waiting=2)
    assert pool.ask("a", "1") == [LoadModel("a")]
    assert pool.ask("a", "2") == []
    [refused] = pool.ask("a", "3")
    assert isinstance(refused, Refuse)
    assert (refused.use, refused.kind, "max_waiting" in refused.reason) == (b"3", "busy", True)
    pool.pool.on_loaded("a", 0, pool.now)
    assert pool.decide() == [Grant("a", b"1"), Grant("a", b"2")]
    for use in "456":
        pool.pool.request("a", use.encode(), "", pool.now)
    assert pool.decide() == [Grant("a", use.encode()) for use in "456"]
