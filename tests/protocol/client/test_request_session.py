"""What a client makes of an orchestrator's messages, also of one that was restarted."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.telemetry.recorder import Recorder
from protocol.client.request_session import RequestSession
from protocol.errors import RuntimeFailure
from protocol.messages import Finished, Generate, Sampling, Status, StatusRequest, Text, Tokens

REQUEST = Generate(request=3, tokens=[1, 2])
REJECTION = Generate(
    request=3, tokens=[1], sampling=Sampling(temperature=1.0, acceptance="rejection")
)


def text(tokens: Tokens, request: int = 3) -> Text:
    pieces = [f"<{token}>" for token in tokens]
    return Text(request=request, tokens=tokens, origins=["target"] * len(tokens), pieces=pieces)


def status(question: int, *, serving: bool, request: int = 3) -> Status:
    """The answer to this question."""
    return Status(
        pid=1, model="", services=[], active=0, waiting=0,
        request=request, question=question, serving=serving,
    )  # fmt: skip


def split(tokens: Tokens, cuts: list[int]) -> Iterator[Text]:
    """These tokens as messages that end at the cuts."""
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    for start, end in zip([0, *ends], ends, strict=False):
        if end > start:
            yield text(tokens[start:end])


@given(st.integers(0, 12), st.lists(st.integers(1, 12)), st.lists(st.integers(1, 12)))
def test_an_answer_is_continued_where_it_stopped(
    had: int, before: list[int], after: list[int]
) -> None:
    """However both answers are cut up, each token and its text arrive once, in order."""
    tokens = list(range(100, 112))
    dialogue = RequestSession(REQUEST)
    got = [dialogue.handle(message) for message in split(tokens[:had], before)]
    assert dialogue.on_silence().question == 1
    assert dialogue.handle(status(1, serving=False)) == REQUEST
    got += [dialogue.handle(message) for message in split(tokens, after)]
    texts = [message for message in got if isinstance(message, Text)]
    assert tokens == [token for message in texts for token in message.tokens]
    assert "".join(f"<{token}>" for token in tokens) == "".join(m.text for m in texts)
    assert len(tokens) == sum(len(message.origins) for message in texts)


def test_the_rest_of_the_text_comes_once() -> None:
    """Text that the end sets free has no tokens; it is not repeated with a repeated answer."""
    rest = Text(request=3, tokens=[], origins=[], pieces=["!"])
    dialogue = RequestSession(REQUEST)
    assert dialogue.handle(text([5])) == text([5])
    assert dialogue.handle(rest) == rest
    dialogue.on_silence()
    assert dialogue.handle(status(1, serving=False)) == REQUEST
    assert dialogue.handle(text([5])) is None
    assert dialogue.handle(rest) is None


def test_a_served_request_is_waited_for() -> None:
    """As long as an orchestrator serves it, nothing is sent again."""
    dialogue = RequestSession(REQUEST)
    assert dialogue.on_silence() == StatusRequest(request=3, question=1)
    assert dialogue.handle(status(1, serving=True)) is None


def test_a_dropped_request_is_asked_again() -> None:
    """The same orchestrator may have dropped a request whose client did not read."""
    dialogue = RequestSession(REQUEST)
    dialogue.on_silence()
    assert dialogue.handle(status(1, serving=False)) == REQUEST


def test_a_request_is_sent_once_for_many_questions() -> None:
    """An orchestrator that starts slowly finds all questions that were asked meanwhile: the
    answers to those that are older than the repeated request say nothing about it."""
    dialogue = RequestSession(REQUEST)
    assert [dialogue.on_silence().question for _ in range(4)] == [1, 2, 3, 4]
    assert dialogue.handle(status(1, serving=False)) == REQUEST
    for question in (2, 3, 4):
        assert dialogue.handle(status(question, serving=False)) is None
    assert dialogue.on_silence().question == 5
    assert dialogue.handle(status(5, serving=False)) == REQUEST


def test_other_answers_to_status_mean_nothing() -> None:
    """A status that was asked for other reasons says nothing about the request."""
    dialogue = RequestSession(REQUEST)
    dialogue.on_silence()
    assert dialogue.handle(status(1, serving=False, request=0)) is None
    assert dialogue.handle(text([5], request=4)) is None


def test_what_cannot_be_repeated_fails() -> None:
    """Under the rejection rule a restart ends an answer that has begun, and says so."""
    dialogue = RequestSession(REJECTION)
    dialogue.on_silence()
    assert dialogue.handle(status(1, serving=False)) == REJECTION
    dialogue.handle(text([5]))
    dialogue.on_silence()
    with pytest.raises(RuntimeFailure, match="rejection rule"):
        dialogue.handle(status(2, serving=False))


def test_silence_has_an_end() -> None:
    """Thirty questions without an answer; any word forgives them."""
    dialogue = RequestSession(REQUEST)
    for _ in range(30):
        dialogue.on_silence()
    dialogue.handle(status(1, serving=True))
    for _ in range(30):
        dialogue.on_silence()
    with pytest.raises(RuntimeFailure, match="no longer answers"):
        dialogue.on_silence()


def test_a_failed_request_is_an_error() -> None:
    """The orchestrator's reason is raised."""
    finished = Finished(
        request=3,
        reason="error",
        prompt_tokens=1,
        statistics=Recorder(0.0).summarise(),
        error="no luck",
    )
    with pytest.raises(RuntimeFailure, match="no luck"):
        RequestSession(REQUEST).handle(finished)
