"""From tokens to text: stop strings, and what is held back because it may become one."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.requests.request import Request
from orchestrator.telemetry.recorder import Recorder
from orchestrator.text.stop_strings import StoppableText
from protocol.messages import Finished, Text
from tests.support.fakes import chain_of


@dataclass
class Spelling:
    """A stream whose tokens are indices into a list of strings."""

    strings: list[str]

    def push(self, token: int) -> str:
        return self.strings[token]

    def end(self) -> str:
        return ""


@dataclass
class Asker:
    """As much of a sequence as an answer's text needs."""

    number: int = 1
    round: int = 1
    recorder: Recorder = field(default_factory=lambda: Recorder(0.0))


def stoppable(strings: list[str], stop: list[str]) -> StoppableText:
    stream: Any = Spelling(strings)
    return StoppableText(stream, stop)


def told(strings: list[str], stop: list[str]) -> tuple[str, bool]:
    """All text of these tokens, and whether a stop string ended it."""
    text = stoppable(strings, stop)
    shown = ""
    for token in range(len(strings)):
        pushed = text.push(token)
        shown += pushed.text
        if pushed.stopped:
            return shown, True
    return shown + text.flush(), False


WORDS = st.lists(st.text("ab", max_size=3), max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=1)


def test_without_stop_strings_nothing_is_held_back() -> None:
    """Each token's text is shown at once."""
    text = stoppable(["He", "llo", ""], [])
    assert [text.push(i) for i in range(3)] == [("He", False), ("llo", False), ("", False)]
    assert text.flush() == ""


@pytest.mark.parametrize(
    ("strings", "stop", "expected"),
    [
        (["one", "END", "two"], ["END"], ("one", True)),
        (["one E", "N", "D two"], ["END"], ("one ", True)),
        (["oneENDtwo"], ["END"], ("one", True)),
        (["one E", "N", "X"], ["END"], ("one ENX", False)),
        (["one E", "N"], ["END"], ("one EN", False)),
        (["a", "a", "a", "b"], ["aab"], ("a", True)),
        (["EEN", "END"], ["END"], ("EEN", True)),
        (["x", "END"], ["STOP", "END"], ("x", True)),
        (["xENDySTOP"], ["STOP", "END"], ("x", True)),
        (["x\n", "\ny"], ["\n\n"], ("x", True)),
        (["x", ""], ["", "y"], ("x", False)),
        (["END"], ["END"], ("", True)),
        (["END"], ["ENDING"], ("END", False)),
        ([], ["END"], ("", False)),
    ],
    ids=str,
)
def test_stop_strings_cut(strings: list[str], stop: list[str], expected: tuple[str, bool]) -> None:
    """The text ends before the first stop string, wherever the borders of tokens fall."""
    assert expected == told(strings, stop)


@given(WORDS, STOPS)
def test_borders_of_tokens_do_not_matter(strings: list[str], stop: list[str]) -> None:
    """With one stop string, the shown text is the whole text cut at the string's first place."""
    whole = "".join(strings)
    at = whole.find(stop[0])
    expected = (whole, False) if at < 0 else (whole[:at], True)
    assert expected == told(strings, stop)


@given(WORDS, st.lists(st.text("ab", max_size=3), max_size=3))
def test_no_stop_string_is_ever_shown(strings: list[str], stop: list[str]) -> None:
    """Whatever the stop strings, what is shown begins the whole text and contains none of them."""
    whole = "".join(strings)
    shown, stopped = told(strings, stop)
    stop_strings = [string for string in stop if string]
    assert whole.startswith(shown)
    assert not any(string in shown for string in stop_strings)
    assert stopped is any(string in whole for string in stop_strings)


@given(WORDS, STOPS)
def test_as_little_as_possible_is_held_back(strings: list[str], stop: list[str]) -> None:
    """Held back is exactly the longest ending that may still become the stop string."""
    text, shown, whole = stoppable(strings, stop), "", ""
    for token, string in enumerate(strings):
        pushed = text.push(token)
        whole += string
        shown += pushed.text
        if pushed.stopped:
            return
        held = whole[len(shown) :]
        longer = [whole[i:] for i in range(len(shown)) if stop[0].startswith(whole[i:])]
        assert stop[0].startswith(held)
        assert longer == []
    assert text.flush() == whole[len(shown) :]
    assert text.flush() == ""


def answer(strings: list[str], stop: list[str]) -> Request:
    asker: Any = Asker()
    return Request(b"peer", 1, asker, stoppable(strings, stop), 0)


@given(WORDS, STOPS, st.lists(st.integers(1, 4), min_size=8, max_size=8))
def test_rounds_do_not_matter(strings: list[str], stop: list[str], sizes: list[int]) -> None:
    """However tokens are batched into rounds, the client gets the same tokens and pieces."""

    def received(batches: list[list[int]]) -> tuple[list[int], list[str], bool]:
        request = answer(strings, stop)
        tokens: list[int] = []
        pieces: list[str] = []
        for batch in batches:
            if not request.is_stopped:
                text = request.add_tokens(batch, ["target" for _ in batch])
                assert len(text.tokens) == len(text.pieces) == len(text.origins)
                assert text.text == "".join(text.pieces)
                tokens += text.tokens
                pieces += text.pieces
        return tokens, pieces, request.is_stopped

    every = list(range(len(strings)))
    batches: list[list[int]] = []
    for size in sizes:
        batches, every = [*batches, every[:size]], every[size:]
    expected = received([[token] for token in range(len(strings))])
    assert expected == received([batch for batch in batches if batch])


def test_tokens_after_a_stop_string_are_retracted() -> None:
    """The token that completes a stop string is the last of the answer; the rest never was."""
    request = answer(["a", "EN", "D", "b", "c"], ["END"])
    recorder = request.sequence.recorder
    recorder.count_verified(chain_of([0.5] * 4), ["hit", "hit", "miss", "hit"], "hit")
    recorder.count_emitted(5, 0.0)
    text = request.add_tokens([0, 1, 2, 3, 4], ["hit", "hit", "miss", "hit", "target"])
    assert (
        text.tokens,
        text.origins,
        text.pieces,
    ) == ([0, 1, 2], ["hit", "hit", "miss"], ["a", "", ""])
    assert request.is_stopped
    assert (recorder.emitted, recorder.accepted) == (3, 3)


def test_the_rest_has_no_token() -> None:
    """Text held back until the end is a piece of its own."""
    request = answer(["aE"], ["END"])
    assert request.add_tokens([0], ["target"]).text == "a"
    rest, end = request.last_messages("length", "")
    assert isinstance(rest, Text)
    assert (rest.tokens, rest.origins, rest.pieces) == ([], [], ["E"])
    assert isinstance(end, Finished)


def test_a_stop_string_in_the_last_tokens_is_the_reason() -> None:
    """An answer that is full and stopped at once was stopped; an error stays an error."""
    for reason, expected in (("length", "stop"), ("context", "stop"), ("error", "error")):
        request = answer(["EN", "D"], ["END"])
        request.add_tokens([0, 1], ["hit", "target"])
        [end] = request.last_messages(reason, "")
        assert isinstance(end, Finished)
        assert end.reason == expected
