"""What one text says about its own repeats."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.text_trust import TextTrust


def test_a_text_begins_with_the_common_rate() -> None:
    assert TextTrust().factor == 1.0


def test_a_few_wrong_places_are_enough_and_right_ones_win_it_back() -> None:
    """Three that were expected nearly surely leave less than half; it takes longer to return."""
    trust = TextTrust()
    for _ in range(3):
        trust.observe(0.9, right=False)
    assert trust.factor < 0.5
    for _ in range(12):
        trust.observe(0.9, right=True)
    assert trust.factor > 0.8


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=60))
def test_it_never_promises_more_than_other_texts(seen: list[tuple[float, bool]]) -> None:
    """Nor nothing at all: what is expected rarely and fails says little."""
    trust = TextTrust()
    for rate, right in seen:
        trust.observe(rate, right=right)
    assert 0.0 < trust.factor <= 1.0


def test_rightness_as_expected_changes_little() -> None:
    """Half of what is expected at one half."""
    trust = TextTrust()
    for number in range(40):
        trust.observe(0.5, right=number % 2 == 0)
    assert trust.factor > 0.85
