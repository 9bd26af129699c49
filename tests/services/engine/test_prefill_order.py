"""Whose prompt is computed next: short ones first, and nobody starves."""

from services.engine.chunked_prefill import PrefillOrder


def order(**tokens: int) -> PrefillOrder:
    """Prompts of these lengths, all of which have just come."""
    made = PrefillOrder()
    for name, count in tokens.items():
        made.add(ord(name), count, 0.0)
    return made


def turns(made: PrefillOrder, now: float, room: int = 100) -> str:
    """Who may go now, by name."""
    return "".join(chr(n) for n in sorted(made._waiting) if made.may_go(n, room, now))


def test_the_shortest_goes_first() -> None:
    """However long the others are, and in which order they came."""
    assert turns(order(a=6000, b=200, c=900), 0.0) == "b"
    assert turns(order(a=200, b=200), 0.0) == "a"


def test_short_ones_share_a_pass() -> None:
    """Whoever finds room beside those before it; the last of them may be cut."""
    assert turns(order(a=40, b=30, c=500, d=600), 0.0) == "abc"
    assert turns(order(a=40, b=60, c=500), 0.0) == "ab"


def test_a_long_prompt_in_work_lets_a_short_one_by() -> None:
    """What was computed already is no claim to the next pass."""
    made = order(a=6000)
    made.on_chunk(ord("a"), 1000, 2.0)
    made.add(ord("b"), 100, 2.0)
    assert turns(made, 2.1) == "b"
    made.remove(ord("b"))
    assert turns(made, 2.1) == "a"


def test_of_two_equal_prompts_one_is_finished_first() -> None:
    """Turn by turn, both would be late."""
    made = order(a=6000, b=6000)
    now, done = 0.0, ""
    for _ in range(10):
        [name] = turns(made, now)
        made.on_chunk(ord(name), 100, 0.2)
        now, done = now + 0.2, done + name
    assert done == "a" * 10


def test_nobody_starves() -> None:
    """Beside short prompts that come without end, a long one has its turns in the end."""
    made = order(a=5000)
    now, served = 0.0, 0
    for number in range(1000, 1400):
        made.add(number, 100, now)
        while served < 4900 and made.may_go(ord("a"), 100, now):
            made.on_chunk(ord("a"), 100, 0.2)
            served += 100
            now += 0.2
        made.on_chunk(number, 100, 0.2)
        made.remove(number)
        now += 0.2
        if served >= 4900:
            break
    assert served >= 4900


def test_waiting_counts_and_work_does_not() -> None:
    """Of two equal prompts the one that was computed less has waited longer."""
    made = order(a=1000, b=1100)
    made.on_chunk(ord("a"), 0, 5.0)
    assert turns(made, 10.0) == "b"
