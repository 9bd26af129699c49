"""The verifier commits the tokens of plain decoding, whatever the drafts."""

import weakref
from collections import deque
from collections.abc import Iterator
from functools import cache
from itertools import count

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.messages import (
    CloseSequence,
    DraftDistribution,
    LogitsOptions,
    OpenSequence,
    Prefilled,
    PrefillProgress,
    Prepare,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.engine import chunked_prefill
from services.runtime.inbox import Work
from services.verifier.verifier import SpareCores, Verifier
from tests.properties import examples
from tests.support.reference import SAMPLINGS, plain, tiny_verifier
from tests.support.tiny_models import EOS, FAMILIES

LENGTH = 33
PROMPTS = {
    "short": (11, 200),
    "long": (0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64, 5, 120, 31, 88, 160, 3),
}
NUMBERS = count(1)

Draft = tuple[int, int]
"""Tokens of a draft that are right, and the wrong ones after them."""

drafts: st.SearchStrategy[Draft] = st.integers(0, 8).flatmap(
    lambda size: st.integers(0, size).map(lambda right: (right, size - right))
)


@cache
def verifier_of(family: str, prefill_step_size: int = 512) -> Verifier:
    return tiny_verifier(family, prefill_step_size)


class Line:
    """One open sequence at a verifier: asks, and checks what comes back."""

    def __init__(self, verifier: Verifier, prompt: Tokens, sampling: Sampling) -> None:
        self.verifier = verifier
        self.number = next(NUMBERS)
        self.committed = list(prompt)
        self.round = 0
        *_, opened = verifier.handle(
            OpenSequence(sequence=self.number, tokens=prompt[:-1], sampling=sampling)
        )
        assert isinstance(opened, Prefilled)
        assert (self.number, len(prompt) - 1) == (opened.sequence, opened.length)
        assert len(prompt) - 1 == self.kv_length()

    def verify(self, draft: Tokens) -> VerificationOutcome:
        """Verify a draft after the pending token, and commit what was accepted."""
        self.round += 1
        asked = Verify(
            sequence=self.number,
            round=self.round,
            position=len(self.committed) - 1,
            nodes=[self.committed[-1], *draft],
        )
        return self.commit(draft, list(self.verifier.handle(asked))[-1])

    def commit(self, draft: Tokens, outcome: object) -> VerificationOutcome:
        """Take in what the verification of a draft brought."""
        assert isinstance(outcome, VerificationOutcome)
        assert (self.number, self.round) == (outcome.sequence, outcome.round)
        self.committed += [*draft[: outcome.accepted], outcome.bonus]
        return outcome

    def kv_length(self) -> int:
        """How many tokens the KV holds, as the verifier tells one who is wrong about it."""
        with pytest.raises(ProtocolError, match=r"the KV holds \d+ tokens") as error:
            list(
                self.verifier.handle(
                    Verify(sequence=self.number, round=0, position=10**6, nodes=[1])
                )
            )
        return int(str(error.value).split()[-2])

    def close(self) -> None:
        assert list(self.verifier.handle(CloseSequence(sequence=self.number))) == []


def draft_of(rest: Tokens, right: int, wrong: int) -> Tokens:
    """The first `right` of the tokens to come, then `wrong` ones that differ from them."""
    others = [(token + 1) % 288 for token in [*rest, *rest][right : right + wrong]]
    return rest[:right] + others


def check_rounds(family: str, prompt: str, sampling: Sampling, wanted: list[Draft]) -> None:
    """Each round accepts what is right and adds the token that plain decoding has there."""
    rest = plain(family, PROMPTS[prompt], LENGTH, sampling)
    line = Line(verifier_of(family), list(PROMPTS[prompt]), sampling)
    for right, wrong in wanted:
        if right >= len(rest):
            break
        outcome = line.verify(draft_of(rest, right, wrong))
        assert (right, rest[right]) == (outcome.accepted, outcome.bonus)
        assert len(line.committed) - 1 == line.kv_length()
        rest = rest[right + 1 :]
    line.close()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chains_commit_the_tokens_of_plain_decoding(family: str, sampling: Sampling) -> None:
    """Right and wrong drafts change no token, and leave only committed ones in the KV.

    The sequence grows to six times the sliding window.
    """
    wanted = [(0, 3), (3, 5), (8, 0), (1, 0), (0, 0), (0, 8), (6, 2), (4, 1), (2, 6)]
    check_rounds(family, "long", sampling, wanted)


@examples(30)
@given(
    wanted=st.lists(drafts, min_size=1, max_size=12),
    family=st.sampled_from(["sliding", "gemma3", "llama3"]),
    prompt=st.sampled_from(sorted(PROMPTS)),
    sampling=st.sampled_from(list(SAMPLINGS.values())),
)
def test_random_chains_commit_the_tokens_of_plain_decoding(
    wanted: list[Draft], family: str, prompt: str, sampling: Sampling
) -> None:
    """So do random chains; what a rejected draft pushed out of a window comes back."""
    check_rounds(family, prompt, sampling, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_equals_one_shot(family: str) -> None:
    """A prompt fed three tokens at a time is answered like one fed at once; so is an empty one."""
    for length in (1, 4, 18):
        prompt = PROMPTS["long"][:length]
        expected = plain(family, prompt, 3, Sampling())
        for step in (3, 512):
            line = Line(verifier_of(family, step), list(prompt), Sampling())
            for _ in expected:
                line.verify([])
            assert expected == line.committed[length:]
            line.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_long_drafts_are_taken(family: str) -> None:
    """The longest draft that a verifier announces is verified, and no longer one."""
    line = Line(verifier_of(family), list(PROMPTS["short"]), Sampling())
    limit = line.verifier.max_draft_tokens
    assert limit == 64
    draft = draft_of(plain(family, PROMPTS["short"], LENGTH, Sampling()), 5, limit - 5)
    assert len(draft) == limit
    with pytest.raises(ProtocolError, match="cannot verify a chain of 66 tokens"):
        line.verify([*draft, 1])
    assert line.verify(draft).accepted == 5


def test_a_refused_round_changes_nothing() -> None:
    """After wrong positions and impossible chains the next round is answered as ever."""
    line = Line(verifier_of("llama"), list(PROMPTS["long"]), Sampling())
    position = len(PROMPTS["long"]) - 1
    for wrong in (0, position - 1, position + 1):
        ask = Verify(sequence=line.number, round=1, position=wrong, nodes=[line.committed[-1]])
        with pytest.raises(ProtocolError, match=f"position {wrong} but the KV holds {position} "):
            list(line.verifier.handle(ask))
    for chain, size in (([], 0), ([1] * 66, 66)):
        ask = Verify(sequence=line.number, round=1, position=position, nodes=chain)
        with pytest.raises(ProtocolError, match=f"cannot verify a chain of {size} tokens"):
            list(line.verifier.handle(ask))
    expected = plain("llama", PROMPTS["long"], 3, Sampling())
    assert line.verify(expected[:2]).bonus == expected[2]


def test_unknown_sequences_are_refused() -> None:
    """A sequence that was never opened, or was closed, is a ProtocolError with its number."""
    verifier = verifier_of("llama")
    line = Line(verifier, [1, 2, 3], Sampling())
    line.close()
    for number in (line.number, 10**6):
        with pytest.raises(ProtocolError, match=f"sequence {number} is not open"):
            list(verifier.handle(Verify(sequence=number, round=1, position=2, nodes=[3])))
        assert list(verifier.handle(CloseSequence(sequence=number))) == []


def test_what_is_not_for_a_verifier_is_refused() -> None:
    """A drafter's message is a ProtocolError that names it."""
    prepare = Prepare(sequence=1, round=1, base=0, tokens=[], nodes=[1], fan_out=[1], depth=1)
    with pytest.raises(ProtocolError, match="a verifier cannot handle Prepare"):
        list(verifier_of("llama").handle(prepare))


@pytest.mark.parametrize("family", ["sliding", "gemma3", "mamba"])
def test_interleaved_sequences_do_not_disturb_one_another(family: str) -> None:
    """Sequences with prompts, samplings and rounds of their own each get their own tokens."""
    verifier = verifier_of(family)
    right = 3
    lines = [
        (Line(verifier, list(prompt), sampling), plain(family, prompt, 16, sampling))
        for prompt in PROMPTS.values()
        for sampling in SAMPLINGS.values()
    ]
    for step in range(0, 16, right + 1):
        for line, expected in lines:
            line.verify(expected[step : step + right])
    for line, expected in lines:
        assert expected == line.committed[-16:]


def test_opening_again_replaces() -> None:
    """A sequence that is opened again starts from its new tokens and sampling."""
    verifier = verifier_of("llama")
    line = Line(verifier, list(PROMPTS["long"]), Sampling())
    line.verify([])
    sampling = SAMPLINGS["sampled"]
    *_, opened = verifier.handle(OpenSequence(sequence=line.number, tokens=[11], sampling=sampling))
    assert isinstance(opened, Prefilled)
    assert opened.length == 1
    line.committed = list(PROMPTS["short"])
    expected = plain("llama", PROMPTS["short"], 3, sampling)
    assert line.verify(expected[:2]).bonus == expected[2]


def test_an_abandoned_prefill_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill can be left before and after a chunk; the sequence is not open then."""
    monkeypatch.setattr(chunked_prefill, "_STEPS_ALONE", 1)  # on CUDA, too
    verifier = tiny_verifier("llama", 3)
    line = Line(verifier, [1, 2, 3], Sampling())
    again = OpenSequence(sequence=line.number, tokens=[5] * 7, sampling=Sampling())
    assert list(verifier.handle(again))[:-1] == [None] * 6
    opening = verifier.handle(again)
    assert next(opening) is None
    opening.close()
    with pytest.raises(ProtocolError, match="is not open"):
        line.verify([])


def test_closing_frees_the_kv_at_once() -> None:
    """The buffers of a closed sequence do not wait for the garbage collector."""
    verifier, number = verifier_of("llama"), next(NUMBERS)
    list(verifier.handle(OpenSequence(sequence=number, tokens=[1, 2, 3], sampling=Sampling())))
    list(verifier.handle(Verify(sequence=number, round=1, position=3, nodes=[4, 5])))
    caches = [weakref.ref(cache) for cache in verifier._sequences[number].state.caches]
    assert all(cache() is not None for cache in caches)
    list(verifier.handle(CloseSequence(sequence=number)))
    assert [None] * len(caches) == [cache() for cache in caches]


def messages() -> Iterator[Work]:
    for number in (1, 2):
        yield OpenSequence(sequence=number, tokens=[1], sampling=Sampling())
        yield Verify(sequence=number, round=1, position=1, nodes=[1])
        yield CloseSequence(sequence=number)


def test_only_the_end_of_a_sequence_supersedes() -> None:
    """Work is pointless once its sequence is closed or opened again; nothing else is."""
    verifier = verifier_of("llama")
    found = {
        (type(news), type(current), news.sequence == current.sequence)
        for news in messages()
        for current in messages()
        if verifier.supersedes(news, current)
    }
    news, work = (OpenSequence, CloseSequence), (OpenSequence, Verify)
    assert {(kind, old, True) for kind in news for old in work} == found


@pytest.mark.parametrize("shape", ["bias", "grammar"])
def test_what_is_ruled_out_costs_no_row(shape: str) -> None:
    """The chain ends before it, and the outcome is that of the whole chain."""
    free = Line(verifier_of("llama"), list(PROMPTS["short"]), Sampling())
    first = free.verify([]).bonus
    wrong = (first + 1) % 288
    shapes = {
        "bias": LogitsOptions(logit_bias=((wrong, -100.0),)),
        "grammar": LogitsOptions(grammar=f"start: <[{first}]>+", answer_from=2, stop_ids=(EOS,)),
    }
    sampling = Sampling(logits_options=shapes[shape])
    for draft, rows in (([wrong, first], 1), ([first, wrong, first], 2), ([], 1)):
        line = Line(verifier_of("llama"), list(PROMPTS["short"]), sampling)
        outcome = line.verify(draft)
        assert (rows, first) == (outcome.rows, [*draft[: outcome.accepted], outcome.bonus][0])
        assert outcome.accepted == rows - 1
        assert len(line.committed) - 1 == line.kv_length()
        again = line.verify([])  # what is left is fit for the next round
        plain_line = Line(verifier_of("llama"), line.committed[:-1], sampling)
        if shape == "bias":
            assert again.bonus == plain_line.verify([]).bonus
        line.close()
        plain_line.close()
    free.close()


def test_a_drawn_token_is_looked_at_even_if_ruled_out() -> None:
    """Under the rejection rule its rejection changes the law of the bonus token."""
    sampling = Sampling(
        temperature=1.0,
        acceptance="rejection",
        logits_options=LogitsOptions(logit_bias=((5, -100.0),)),
    )
    named, drawn = DraftDistribution(), DraftDistribution([5, 6], [0.5, 0.5])
    for law, rows in ((named, 1), (drawn, 3)):
        line = Line(verifier_of("llama"), list(PROMPTS["short"]), sampling)
        asked = Verify(
            sequence=line.number, round=1, position=1, nodes=[200, 5, 6], distributions=[law, drawn]
        )
        [*_, outcome] = verifier_of("llama").handle(asked)
        assert isinstance(outcome, VerificationOutcome)
        assert (outcome.rows, outcome.accepted) == (rows, 0)
        line.close()


def test_times_are_told() -> None:
    """An outcome says how long the verifier worked, and how long it had waited before."""
    line = Line(verifier_of("llama"), [1, 2, 3], Sampling())
    first, second = line.verify([]), line.verify([])
    assert min(first.verify_ms, second.verify_ms) > 0
    assert 0 <= second.idle_ms < 60e3


def test_the_drafters_cores_are_borrowed_while_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """For prompts, and for passes beside which nobody drafts for any sequence; not otherwise."""
    used: list[tuple[int, ...]] = []
    monkeypatch.setattr("services.verifier.verifier.use_spare_cores", used.append)
    verifier = tiny_verifier("llama")
    verifier.spare_cores = SpareCores((7,))
    for number in (1, 2):
        deque(verifier.handle(OpenSequence(sequence=number, tokens=[5, 6], sampling=Sampling())))
    assert set(used) == {(7,)}
    for number, idle, cores in ((1, True, ()), (2, True, (7,)), (1, False, ())):
        position = verifier._sequences[number].state.length
        verify = Verify(sequence=number, round=1, position=position, nodes=[9], drafter_idle=idle)
        deque(verifier.handle(verify))
        assert used[-1] == cores


def test_a_long_prompt_is_reported_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many tokens are computed, piece by piece, but for the last; a short one says nothing."""
    monkeypatch.setattr("services.verifier.verifier._PROGRESS_S", 0.0)
    verifier = verifier_of("llama", 3)
    number = next(NUMBERS)
    opening = OpenSequence(sequence=number, tokens=[7] * 10, sampling=Sampling())
    answers = [answer for answer in verifier.handle(opening) if answer is not None]
    reports = [answer.length for answer in answers if isinstance(answer, PrefillProgress)]
    # On CUDA chunks that nobody waits behind are longer.
    assert reports == ([6, 9] if mx.cuda.is_available() else [3, 6, 9])
    assert isinstance(answers[-1], Prefilled)
    longer = OpenSequence(sequence=next(NUMBERS), tokens=[7] * 20, sampling=Sampling())
    continued = [
        answer for answer in verifier.handle(longer) if isinstance(answer, PrefillProgress)
    ]
    assert {answer.cached for answer in continued} == {10}
    short = OpenSequence(sequence=next(NUMBERS), tokens=[8] * 3, sampling=Sampling())
    assert [type(answer) for answer in verifier.handle(short) if answer is not None] == [Prefilled]
