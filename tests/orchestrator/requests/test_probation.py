"""Who is to blame when a service dies, decided without services."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.requests.probation import Probation


def test_one_request_that_kills_twice_is_guilty() -> None:
    """Alone or not, the second death at the same place is its last."""
    probation = Probation(2)
    assert probation.on_death({1: 10}) == []
    assert probation.select([1], []) == [1]
    assert probation.on_death({1: 12}) == [1]
    assert probation.select([2, 3], []) == [2, 3]  # nobody is suspect any more


def test_suspects_run_one_at_a_time() -> None:
    """After a death all that ran are tried alone; the one that the service named comes first."""
    probation = Probation(2)
    probation.on_death({1: 10, 2: 20, 3: 30}, named=2)
    assert probation.select([1, 2, 3, 4], []) == [2]
    assert probation.select([1, 3, 4], [2]) == []
    assert not probation.on_progress(2, 25)
    assert probation.on_progress(2, 36)
    assert probation.select([1, 3, 4], [2]) == [1]  # beside the one that was cleared
    probation.remove(1)
    assert probation.select([3, 4], [2]) == [3]


def test_who_gets_on_is_cleared() -> None:
    """Deaths far apart are not one request's doing, however many there are."""
    probation = Probation(2)
    for death in range(20):
        length = 100 * death
        assert probation.on_death({1: length}) == []
        assert probation.on_progress(1, length + 50)


@given(st.integers(1, 8), st.integers(0, 7), st.integers(0, 99), st.integers(1, 3))
def test_only_the_guilty_is_ended(count: int, poison: int, seed: int, most: int) -> None:
    """Of any number of requests one kills the service whenever it runs: it alone is ended."""
    poison, chance = poison % count, Random(seed)  # noqa: S311  # no secret depends on it
    probation, lengths = Probation(most + 1), dict.fromkeys(range(count), 5)
    running, open_now, ended = set(range(count)), set[int](), list[int]()
    deaths = 0
    while running:
        open_now |= set(probation.select(sorted(running - open_now), open_now))
        assert open_now, "somebody must always run"
        if poison in open_now:
            deaths += 1
            guilty = probation.on_death({n: lengths[n] for n in open_now})
            ended += guilty
            running -= set(guilty)
            open_now = set()
            continue
        number = chance.choice(sorted(open_now))
        lengths[number] += chance.randint(1, 9)
        probation.on_progress(number, lengths[number])
        if lengths[number] > 40:
            running.discard(number)
            open_now.discard(number)
            probation.remove(number)
    assert (ended, deaths) == ([poison], most + 1)
