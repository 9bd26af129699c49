"""Rounds that the verifier begins by itself: those it was given for this outcome, and no others."""

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.messages import (
    CloseSequence,
    LogitsOptions,
    OpenSequence,
    PreparedRound,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
    VerifyAhead,
)
from protocol.transport.codec import encode
from services.runtime.work_queue import WorkQueue
from services.verifier.prepared import PreparedRounds
from services.verifier.verifier import Verifier
from tests.support.reference import SAMPLINGS, plain, tiny_verifier

PROMPT = (0, 2, 97, 41, 250, 33, 8, 141)
LENGTH = 30
LAWS = SAMPLINGS | {
    "penalties": Sampling(
        temperature=0.7, seed=5, logits_options=LogitsOptions(frequency_penalty=0.3)
    )
}


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier("llama")


def open_at(verifier: Verifier, sampling: Sampling, sequence: int = 1) -> None:
    opened = OpenSequence(sequence=sequence, tokens=list(PROMPT[:-1]), sampling=sampling)
    assert [answer for answer in verifier.handle(opened) if answer is not None]


def verify(number: int, tokens: Tokens, draft: Tokens) -> Verify:
    """Of a draft behind these committed tokens, the last of which is pending."""
    return Verify(sequence=1, round=number, position=len(tokens) - 1, nodes=[tokens[-1], *draft])


def outcomes(verifier: Verifier, message: Verify) -> Iterator[VerificationOutcome]:
    for answer in verifier.handle(message):
        if answer is not None:
            assert isinstance(answer, VerificationOutcome)
            yield answer


def prepared(number: int, *rounds: PreparedRound, sequence: int = 1) -> VerifyAhead:
    return VerifyAhead(sequence=sequence, round=number, rounds=list(rounds))


def decode(verifier: Verifier, sampling: Sampling) -> Tokens:
    """Token by token, each asked for."""
    verifier.listener.take = tuple
    open_at(verifier, sampling)
    tokens = [*PROMPT]
    for number in range(1, LENGTH + 1):
        [outcome] = outcomes(verifier, verify(number, tokens, []))
        tokens.append(outcome.bonus)
    return tokens[len(PROMPT) :]


def decode_ahead(verifier: Verifier, sampling: Sampling, rest: Tokens) -> Tokens:
    """With drafts of two right tokens and a wrong one, each round handed over."""
    open_at(verifier, sampling)
    tokens = [*PROMPT]

    def draft_behind(length: int) -> Tokens:
        ahead = rest[length - len(PROMPT) :]
        return [*ahead[:2], *[(token + 1) % 288 for token in ahead[2:3]]]

    def after(number: int, length: int) -> VerifyAhead:
        follows = length + 3
        known = [*PROMPT, *rest][:follows]
        next_round = verify(number + 1, known, draft_behind(follows))
        right = PreparedRound(2, known[-1], 7, encode(next_round))
        wrong = PreparedRound(1, known[-1], 8, encode(verify(99, known, [])))
        return prepared(number, wrong, right)

    number = 1
    waiting = [after(1, len(tokens))]
    verifier.listener.take = lambda: [waiting.pop()] if waiting else []
    for outcome in outcomes(verifier, verify(1, tokens, draft_behind(len(tokens)))):
        assert outcome.round == number
        tokens += [*draft_behind(len(tokens))[: outcome.accepted], outcome.bonus]
        number += 1
        assert outcome.began == (7 if number < 9 else 0)
        if number < 8:
            waiting.append(after(number, len(tokens)))
    assert number == 9
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("law", LAWS)
def test_rounds_that_follow_unasked_have_the_tokens_of_plain_decoding(
    verifier: Verifier, law: str, monkeypatch: pytest.MonkeyPatch, *, gpu: bool
) -> None:
    """Seven in a row, each begun for the outcome of the one before; as on a GPU, too."""
    monkeypatch.setattr(verifier, "pipelines", gpu)
    sampling = LAWS[law]
    truth = decode(verifier, sampling)
    if law in SAMPLINGS:
        assert truth == plain("llama", PROMPT, LENGTH, sampling)
    got = decode_ahead(verifier, sampling, truth)
    assert got == truth[: len(got)]


def test_what_was_prepared_for_another_outcome_is_left(verifier: Verifier) -> None:
    """Another row, token, round or sequence; or withdrawn."""
    open_at(verifier, Sampling())
    open_at(verifier, Sampling(), sequence=2)
    [right] = plain("llama", PROMPT, 1, Sampling())
    message = encode(verify(2, [*PROMPT, right], []))
    wrong = (right + 1) % 288
    verifier.listener.take = lambda: [
        prepared(1, PreparedRound(0, wrong, 1, message), PreparedRound(1, right, 2, message)),
        prepared(0, PreparedRound(0, right, 3, message)),
        prepared(1, PreparedRound(0, right, 4, message), sequence=2),
        prepared(1, PreparedRound(0, right, 5, message), sequence=77),
        prepared(1, PreparedRound(0, right, 6, message)),
        prepared(1, PreparedRound(0, right, 0)),
    ]
    [outcome] = outcomes(verifier, verify(1, [*PROMPT], []))
    assert (outcome.bonus, outcome.began) == (right, 0)


def test_rounds_are_heard_of_beside_the_one_in_work(verifier: Verifier) -> None:
    """They do not wait in the line of their sequence until that is over."""
    open_at(verifier, Sampling())
    first, second = plain("llama", PROMPT, 2, Sampling())
    verifier.listener.take = tuple
    queue = WorkQueue(verifier)
    queue.add(verify(1, [*PROMPT], []))
    queue.add(prepared(1, PreparedRound(0, first, 1, encode(verify(2, [*PROMPT, first], [])))))
    job = queue.next()
    found = [answer for answer in verifier.handle(job.message) if answer is not None]
    told = [(one.bonus, one.began) for one in found if isinstance(one, VerificationOutcome)]
    assert told == [(first, 1), (second, 0)]
    queue.finish(job)
    assert not queue


def test_no_round_follows_a_closed_sequence(verifier: Verifier) -> None:
    """It ends as soon as that is read; what comes later about it is dropped."""
    open_at(verifier, Sampling())
    first, second = plain("llama", PROMPT, 2, Sampling())
    follow = PreparedRound(0, first, 1, encode(verify(2, [*PROMPT, first], [second])))
    verifier.listener.take = lambda: [prepared(1, follow)]
    queue = WorkQueue(verifier)
    queue.add(verify(1, [*PROMPT], []))
    job = queue.next()
    job.answers = verifier.handle(job.message)
    outcome = next(answer for answer in job.answers if answer is not None)
    assert isinstance(outcome, VerificationOutcome)
    assert outcome.began == 1
    queue.add(CloseSequence(sequence=1))
    assert isinstance(queue.next().message, CloseSequence)
    assert list(verifier.handle(queue.next().message)) == []
    queue.add(prepared(1, follow))
    open_at(verifier, Sampling())
    verifier.listener.take = tuple
    [again] = outcomes(verifier, verify(3, [*PROMPT], []))
    assert again.bonus == first


@pytest.mark.parametrize("what", ["no message", "another position"])
def test_what_cannot_be_verified_fails_the_sequence(verifier: Verifier, what: str) -> None:
    """As if it had been sent."""
    open_at(verifier, Sampling())
    [right] = plain("llama", PROMPT, 1, Sampling())
    wrong = b"\x00" if what == "no message" else encode(verify(2, [*PROMPT], []))
    verifier.listener.take = lambda: [prepared(1, PreparedRound(0, right, 1, wrong))]
    with pytest.raises(ProtocolError):
        list(verifier.handle(verify(1, [*PROMPT], [])))
    verifier.listener.take = tuple


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=4),
        ),
        max_size=12,
    ),
    st.integers(0, 3),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
@example([(2, [(0, 0, 1)]), (1, [(0, 1, 2)])], 2, (0, 1))
def test_the_last_word_about_an_outcome_counts(
    sent: list[tuple[int, list[tuple[int, int, int]]]], number: int, outcome: tuple[int, int]
) -> None:
    """Of the youngest round alone, in the order of the messages; and it is used once."""
    table = PreparedRounds()
    for about, rounds in sent:
        offers = [
            PreparedRound(row, bonus, n, encode(verify(about + 1, [bonus], [])))
            for row, bonus, n in rounds
        ]
        table.add(prepared(about, *offers))
    row, bonus = outcome
    youngest = max((about for about, _ in sent), default=0)
    said = [
        n
        for about, rounds in sent
        for r, b, n in rounds
        if about == youngest == number and (r, b) == outcome
    ]
    ended = VerificationOutcome(
        sequence=1, round=number, accepted=row, bonus=bonus, verify_ms=1.0, idle_ms=0.0
    )
    found = table.take(ended)
    assert (found[0] if found is not None else 0) == (said[-1] if said else 0)
    if found is not None:
        assert found[1].round == number + 1
        assert table.take(ended) is None
        assert len(table) == 0
