"""What a drafting program owes: which silence is a hang, and what is too late to pass on."""

import math

import pytest

from protocol.errors import ProtocolError
from protocol.messages import (
    PROTOCOL_VERSION,
    CloseSequence,
    DraftNow,
    DraftTree,
    Failed,
    Heartbeat,
    Hello,
    OpenSequence,
    Prefilled,
    Prepare,
    Sampling,
)
from services.drafter.relay.pending_replies import PendingReplies

PREFILL_S, DRAFT_S = 100.0, 5.0
OPEN = OpenSequence(sequence=1, tokens=[1], sampling=Sampling())
PREFILLED = Prefilled(sequence=1, length=1, prefill_ms=1.0)


def prepare(number: int, sequence: int = 1) -> Prepare:
    return Prepare(
        sequence=sequence, round=number, base=0, tokens=[], nodes=[1], fan_out=[1], depth=1
    )


def draft(number: int) -> DraftNow:
    return DraftNow(sequence=1, round=number, base=0, tokens=[], pending=1, accepted=0, count=2)


def tree(number: int, *, sequence: int = 1, ms: float = 1.0, last: bool = False) -> DraftTree:
    return DraftTree(
        sequence=sequence,
        round=number,
        depth=1,
        outcomes=[],
        tokens=[],
        confidences=[],
        draft_ms=ms,
        last=last,
    )


@pytest.fixture
def opened() -> PendingReplies:
    """The books of a program that has opened sequence 1 at second 1."""
    dues = PendingReplies(PREFILL_S, DRAFT_S)
    dues.note_request(OPEN, 0.0)
    assert dues.filter_reply(PREFILLED, 1.0) == PREFILLED
    return dues


def test_a_prefill_may_take_long_but_not_for_ever() -> None:
    """An opened sequence is owed Prefilled, whatever else was asked meanwhile."""
    dues = PendingReplies(PREFILL_S, DRAFT_S)
    dues.note_request(OPEN, 0.0)
    dues.note_request(draft(1), 1.0)
    assert dues.overdue(PREFILL_S - 1.0) is None
    assert "start_timeout_s" in str(dues.overdue(PREFILL_S + 2.0))


def test_a_draft_that_the_target_waits_for_is_owed(opened: PendingReplies) -> None:
    """Silence after DraftNow is a hang; each tree starts the wait anew; the last one ends it."""
    opened.note_request(draft(1), 10.0)
    assert opened.overdue(14.0) is None
    assert "draft_timeout_s" in str(opened.overdue(15.5))
    opened.filter_reply(tree(1), 15.0)
    assert opened.overdue(19.5) is None
    assert opened.overdue(20.5) is not None
    opened.filter_reply(tree(1, last=True), 20.0)
    assert opened.overdue(1e6) is None


def test_newer_questions_do_not_put_off_the_deadline(opened: PendingReplies) -> None:
    """Who lets the target wait in vain has until the first deadline, whatever is asked next."""
    opened.note_request(draft(1), 10.0)
    opened.note_request(prepare(2), 12.0)
    opened.note_request(draft(3), 14.0)
    assert opened.overdue(14.9) is None
    assert opened.overdue(15.1) is not None


def test_a_tree_pays_the_debt(opened: PendingReplies) -> None:
    """A program that answers the next question is alive."""
    opened.note_request(draft(1), 10.0)
    opened.note_request(prepare(2), 12.0)
    opened.filter_reply(tree(2), 13.0)
    assert opened.overdue(1e6) is None


def test_a_closed_sequence_is_owed_nothing(opened: PendingReplies) -> None:
    """Nobody waits for a draft of a request that is over; and what is prepared is a gift."""
    opened.note_request(draft(1), 10.0)
    opened.note_request(CloseSequence(sequence=1), 11.0)
    opened.note_request(OPEN, 12.0)
    opened.filter_reply(PREFILLED, 13.0)
    opened.note_request(prepare(4), 14.0)
    assert opened.overdue(1e6) is None


def ask_in_vain(dues: PendingReplies, began: float, *, answers: int) -> float:
    """Short answers, 10 seconds apart, each owed its prompt for 4; when the last one ended."""
    for second in (began + 10.0 * number for number in range(answers)):
        dues.note_request(OPEN, second)
        assert dues.overdue(second + 4.0) is None
        dues.note_request(CloseSequence(sequence=1), second + 4.0)
        assert dues.overdue(second + 9.0) is None
    return began + 10.0 * answers


def test_a_hang_is_found_over_short_answers(opened: PendingReplies) -> None:
    """None waits long enough alone; the program is silent over all of them."""
    opened.note_request(draft(1), 5.0)
    opened.note_request(CloseSequence(sequence=1), 9.0)
    now = ask_in_vain(opened, 10.0, answers=int(PREFILL_S / 4.0) - 1)
    opened.note_request(OPEN, now)
    assert opened.overdue(now) is None
    assert "start_timeout_s" in str(opened.overdue(now + 0.5))


@pytest.mark.parametrize("sign", [Heartbeat(), PREFILLED], ids=["alive", "a prompt"])
def test_who_answers_at_last_begins_anew(
    opened: PendingReplies, sign: Heartbeat | Prefilled
) -> None:
    """A program that is slow, not hung, is not accused of what it dropped rightly."""
    now = ask_in_vain(opened, 10.0, answers=int(PREFILL_S / 4.0))
    opened.note_request(OPEN, now)
    opened.filter_reply(sign, now)
    opened.note_request(CloseSequence(sequence=1), now)
    ask_in_vain(opened, now, answers=int(PREFILL_S / 4.0))


@pytest.mark.parametrize("late", [PREFILLED, tree(1), Failed(sequence=1, error="no")], ids=str)
def test_a_late_answer_to_a_closed_sequence_is_a_sign_of_life(
    late: Prefilled | DraftTree | Failed,
) -> None:
    """A slow program whose prompts are all cancelled goes on; what it says helps nobody."""
    dues = PendingReplies(PREFILL_S, DRAFT_S)
    for second in (10.0 * number for number in range(int(PREFILL_S))):
        dues.note_request(OPEN, second)
        dues.note_request(draft(1), second)
        assert dues.overdue(second + 4.0) is None
        dues.note_request(CloseSequence(sequence=1), second + 4.0)
        assert dues.filter_reply(late, second + 5.0) is None


def test_one_late_answer_counts_once(opened: PendingReplies) -> None:
    """Who goes on about what is long over may hang all the same."""
    opened.note_request(draft(1), 2.0)
    opened.note_request(CloseSequence(sequence=1), 3.0)
    opened.filter_reply(tree(1), 4.0)
    other = OpenSequence(sequence=2, tokens=[1], sampling=Sampling())
    opened.note_request(other, 5.0)
    for second in range(6, int(PREFILL_S)):
        opened.filter_reply(tree(1), float(second))
    assert opened.overdue(PREFILL_S + 6.0) is not None


def test_a_draft_may_be_waited_for_longer_than_a_prompt() -> None:
    """If nothing was closed meanwhile, there is only one limit for a draft."""
    dues = PendingReplies(prefill_s=2.0, draft_s=10.0)
    dues.note_request(OPEN, 0.0)
    dues.filter_reply(PREFILLED, 0.5)
    dues.note_request(draft(1), 1.0)
    assert dues.overdue(10.5) is None
    assert "draft_timeout_s" in str(dues.overdue(11.5))


def test_a_short_request_does_not_hide_how_long_another_one_was_owed() -> None:
    dues = PendingReplies(PREFILL_S, DRAFT_S)
    other = OpenSequence(sequence=2, tokens=[1], sampling=Sampling())
    dues.note_request(OPEN, 0.0)
    dues.note_request(other, 0.8 * PREFILL_S)
    dues.note_request(CloseSequence(sequence=2), 0.85 * PREFILL_S)
    dues.note_request(CloseSequence(sequence=1), 0.9 * PREFILL_S)
    dues.note_request(OPEN, 1e3)
    assert dues.overdue(1e3 + 0.05 * PREFILL_S) is None
    assert dues.overdue(1e3 + 0.15 * PREFILL_S) is not None


def test_silence_over_several_sequences_counts_once() -> None:
    """A program that owes two prompts at a time is not twice as silent."""
    dues = PendingReplies(PREFILL_S, DRAFT_S)
    other = OpenSequence(sequence=2, tokens=[1], sampling=Sampling())
    for message in (OPEN, other):
        dues.note_request(message, 0.0)
    for number in (1, 2):
        dues.note_request(CloseSequence(sequence=number), 0.75 * PREFILL_S)
    dues.note_request(OPEN, 1e3)
    assert dues.overdue(1e3 + 0.2 * PREFILL_S) is None
    assert dues.overdue(1e3 + 0.3 * PREFILL_S) is not None


def test_worthless_messages_do_not_put_off_the_deadline(opened: PendingReplies) -> None:
    """Who answers only what nobody asked has hung."""
    opened.note_request(draft(2), 10.0)
    for second in range(11, 16):
        assert opened.filter_reply(tree(1), float(second)) is None
        assert opened.filter_reply(tree(2, sequence=7), float(second)) is None
    assert opened.overdue(15.5) is not None
    assert opened.stale == 10


@pytest.mark.parametrize("sign", [Heartbeat(), tree(1, last=True)], ids=["alive", "late tree"])
def test_a_late_program_does_not_hang(opened: PendingReplies, sign: Heartbeat | DraftTree) -> None:
    """A sign of life, or the draft itself after its time, pays the debt and goes no further."""
    opened.note_request(draft(1), 10.0)
    opened.note_request(prepare(2), 12.0)
    assert opened.filter_reply(sign, 13.0) is None
    assert opened.overdue(1e6) is None


def test_signs_of_life_do_not_replace_the_draft(opened: PendingReplies) -> None:
    """While the target waits, a sign of life only begins the wait anew."""
    opened.note_request(draft(1), 10.0)
    opened.filter_reply(Heartbeat(), 14.0)
    assert opened.overdue(18.0) is None
    assert opened.overdue(19.5) is not None


@pytest.mark.parametrize(
    "late", [tree(1), tree(3), tree(2, sequence=9), Prefilled(sequence=9, length=1, prefill_ms=0.0)]
)
def test_other_rounds_and_sequences_go_no_further(
    opened: PendingReplies, late: DraftTree | Prefilled
) -> None:
    """Only the newest round of an open sequence is passed on."""
    opened.note_request(prepare(2), 2.0)
    assert opened.filter_reply(late, 3.0) is None
    assert opened.filter_reply(tree(2), 3.0) == tree(2)


def test_a_failed_sequence_is_closed(opened: PendingReplies) -> None:
    """Failed is passed on once, and nothing more of that sequence."""
    failed = Failed(sequence=1, error="no")
    opened.note_request(draft(1), 10.0)
    assert failed == opened.filter_reply(failed, 11.0)
    assert opened.overdue(1e6) is None
    assert opened.filter_reply(tree(1), 12.0) is None


@pytest.mark.parametrize("lie", [math.nan, math.inf, -1.0, 1e9])
def test_times_that_cannot_be_are_replaced(opened: PendingReplies, lie: float) -> None:
    """The planner never sees a time longer than the wait, negative, or no number."""
    opened.note_request(prepare(2), 2.0)
    answer = opened.filter_reply(tree(2, ms=lie), 2.5)
    assert isinstance(answer, DraftTree)
    assert answer.draft_ms == 500.0


def test_a_second_hello_is_an_error(opened: PendingReplies) -> None:
    """A program introduces itself once."""
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        role="drafter",
        pid=1,
        backend="x",
        model="",
        tokenizer_fingerprint="",
        vocabulary_size=0,
        context_length=0,
        compute_unit="cpu",
        max_draft_tokens=1,
    )
    with pytest.raises(ProtocolError, match="second Hello"):
        opened.filter_reply(hello, 1.0)
