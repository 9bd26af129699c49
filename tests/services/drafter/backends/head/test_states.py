"""The target's states as a head keeps them: the last ones of each position, without copies."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.drafter.backends.head.states import StateRun

WINDOW = 8


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6), st.booleans()), max_size=40))
def test_states_are_those_that_arrived_last(events: list[tuple[int, int, bool]]) -> None:
    """In any order, with gaps and rewinds: each position has what came last, or nothing."""
    run, last = StateRun(WINDOW), dict[int, int]()
    for number, (position, count, appended) in enumerate(events):
        first = run.end if appended else position
        run.add(first, np.full((count, 2), number))
        last.update(dict.fromkeys(range(first, first + count), number))
        if not appended and position % 3 == 0:
            run.trim(position)
        for place in range(run.first, run.end):
            np.testing.assert_array_equal(run.at(place, place + 1), [[last[place]] * 2])
        assert run.end - run.first <= 2 * WINDOW + 6


def test_a_state_more_does_not_copy_those_before() -> None:
    """A long answer: each round adds a few, and the window is large."""
    run = StateRun(4096)
    run.add(0, np.zeros((1, 4)))
    copies, held = 0, run.at(0, 1)
    for position in range(1, 4000):
        run.add(position, np.ones((1, 4)))
        copies += not np.shares_memory(held, run.at(0, 1))
        held = run.at(0, 1)
    assert copies < 20
