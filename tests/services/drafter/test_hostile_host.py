"""A host of another kind, or of no good will: whatever it says, the drafter answers or refuses."""

import contextlib
from functools import cache
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.errors import ProtocolError
from protocol.messages import (
    MAX_PREPARED,
    CloseSequence,
    DraftNow,
    DraftTree,
    FromDrafter,
    LogitsOptions,
    OpenSequence,
    Prepare,
    Sampling,
    Tokens,
)
from protocol.transport.codec import Decoder, encode
from services.drafter.backends.base import MAX_DRAFT_TOKENS, DraftBackend
from services.drafter.backends.mlx import MlxBackend
from services.drafter.drafter import Drafter
from services.runtime.inbox import Work
from tests.services.drafter.lookup_backend import LookupBackend
from tests.support.reference import tiny_folder
from tests.support.tiny_models import EOS, vocabulary_size

FOLDER = tiny_folder("llama")
DECODER: Decoder[FromDrafter] = Decoder(FromDrafter)
PROMPT = list(range(20, 40))

VOCABULARY = vocabulary_size()
some_token = st.one_of(*[st.integers(0, VOCABULARY - 1)] * 9, st.integers(VOCABULARY, 2**31 - 1))
tokens = st.lists(some_token, max_size=6)
numbers = st.integers(0, 2)
small = st.integers(0, 5)
messages: st.SearchStrategy[Work] = st.one_of(
    st.builds(
        OpenSequence,
        sequence=numbers,
        tokens=tokens,
        sampling=st.sampled_from(
            [
                Sampling(),
                Sampling(temperature=1.0, seed=3, acceptance="rejection", saguaro=0.2),
                Sampling(logits_options=LogitsOptions(grammar='start: "ab"', stop_ids=(EOS,))),
            ]
        ),
    ),
    st.builds(
        Prepare,
        sequence=numbers,
        round=small,
        base=st.integers(0, 22),
        tokens=tokens,
        nodes=tokens,
        fan_out=st.lists(st.sampled_from((0, 1, 2, 3, MAX_PREPARED)), max_size=6),
        depth=st.integers(0, 3),
        held_back=st.integers(0, 400),
    ),
    st.builds(
        DraftNow,
        sequence=numbers,
        round=small,
        base=st.integers(0, 22),
        tokens=tokens,
        pending=some_token,
        accepted=small,
        count=st.integers(0, 3),
        held_back=st.integers(0, 400),
    ),
    st.builds(CloseSequence, sequence=numbers),
)


@cache
def backend_of(kind: str) -> DraftBackend:
    return MlxBackend(FOLDER, prefill_step_size=4) if kind == "mlx" else LookupBackend(FOLDER)


def is_sound(drafter: Drafter, message: Work) -> bool:
    """Whether a message fits what the drafter holds: by the rules, written down once more."""
    lengths = drafter._lengths
    match message:
        case OpenSequence():
            return fits(drafter, message.tokens)
        case CloseSequence():
            return True
        case Prepare() | DraftNow():
            known = message.sequence in lengths and message.base <= lengths[message.sequence]
            if not known or not fits(drafter, message.tokens):
                return False
        case _:
            raise AssertionError(message)
    if isinstance(message, DraftNow):
        return fits(drafter, [message.pending])
    rows = len(message.nodes)
    return (
        fits(drafter, message.nodes)
        and 1 <= rows <= 1 + MAX_DRAFT_TOKENS
        and len(message.fan_out) <= rows
        and sum(message.fan_out) <= MAX_PREPARED
    )


def fits(drafter: Drafter, numbers: Tokens) -> bool:
    size = drafter._backend.identity.vocabulary_size or 2**31
    return all(number < size for number in numbers)


def answers(drafter: Drafter, message: Work, most: int) -> list[FromDrafter]:
    """What the drafter says to a message until it is interrupted; it refuses what is unsound."""
    sound, work = is_sound(drafter, message), drafter.handle(message)
    found: list[FromDrafter] = []
    refusal = ""
    with contextlib.closing(work):
        try:
            found += (answer for answer in islice(work, most) if answer is not None)  # type: ignore[misc]
        except ProtocolError as error:
            refusal = str(error)
    # Lookup takes any token, but a grammar is about the model's.
    assert sound == (not refusal or "grammar" in refusal), refusal
    return found


def good_draft(drafter: Drafter) -> list[DraftTree]:
    """What an honest host gets on a sequence of its own."""
    list(drafter.handle(OpenSequence(sequence=9, tokens=PROMPT, sampling=Sampling())))
    ask = DraftNow(
        sequence=9, round=1, base=len(PROMPT), tokens=[], pending=40, accepted=0, count=3
    )
    return [answer for answer in drafter.handle(ask) if isinstance(answer, DraftTree)]


@pytest.mark.parametrize("kind", ["mlx", "ngram"])
@given(said=st.lists(st.tuples(messages, st.integers(1, 9)), max_size=12))
def test_a_host_can_say_anything(kind: str, said: list[tuple[Work, int]]) -> None:
    """Every answer is a valid message, no error is the drafter's own, and others lose nothing."""
    drafter = Drafter(backend_of(kind))
    expected = [tree.tokens for tree in good_draft(drafter)]
    drafter.forget()
    for number in (0, 1):  # what is said about them is not refused for that alone
        list(drafter.handle(OpenSequence(sequence=number, tokens=PROMPT, sampling=Sampling())))
    for message, most in said:
        for answer in answers(drafter, message, most):
            assert DECODER.decode(encode(answer)) == answer
    assert [tree.tokens for tree in good_draft(drafter)] == expected
    drafter.forget()


LENGTH = len(PROMPT)
PREPARE = Prepare(
    sequence=1, round=1, base=LENGTH, tokens=[], nodes=[20, 21], fan_out=[1, 1], depth=1
)
DRAFT = DraftNow(sequence=1, round=1, base=LENGTH, tokens=[], pending=20, accepted=0, count=1)
UNSOUND: dict[str, Work] = {
    "a prompt of no tokens of ours": OpenSequence(
        sequence=2, tokens=[1, VOCABULARY], sampling=Sampling()
    ),
    "a round of a sequence that is not open": replace(PREPARE, sequence=2),
    "a round on tokens that were never sent": replace(PREPARE, base=LENGTH + 1),
    "a round after an unknown token": replace(PREPARE, base=3, tokens=[VOCABULARY]),
    "a chain with an unknown token": replace(PREPARE, nodes=[20, 2**31 - 1]),
    "no chain": replace(PREPARE, nodes=[], fan_out=[]),
    "a chain that is too long": replace(PREPARE, nodes=[20] * (2 + MAX_DRAFT_TOKENS)),
    "a fan-out behind the chain": replace(PREPARE, fan_out=[0, 0, 1]),
    "too many branches": replace(PREPARE, fan_out=[MAX_PREPARED, 1]),
    "a draft of a sequence that is not open": replace(DRAFT, sequence=2),
    "a draft on tokens that were never sent": replace(DRAFT, base=LENGTH + 1),
    "a draft after an unknown token": replace(DRAFT, base=3, tokens=[VOCABULARY]),
    "a draft from an unknown token": replace(DRAFT, pending=VOCABULARY),
}


@pytest.mark.parametrize("kind", ["mlx", "ngram"])
@pytest.mark.parametrize("name", UNSOUND)
def test_each_rule_is_kept(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that breaks one rule is refused, changes nothing, and no backend sees it."""
    message = UNSOUND[name]
    if kind == "ngram" and "token" in name and "tokens that were" not in name:
        pytest.skip("lookup has no vocabulary: any token may be looked up")
    drafter = Drafter(backend_of(kind))
    list(drafter.handle(OpenSequence(sequence=1, tokens=PROMPT, sampling=Sampling())))
    before = [list(drafter.handle(DRAFT)), dict(drafter._lengths)]
    with monkeypatch.context() as watched:
        for name_of_call in ("open", "commit", "prepare", "draft"):
            watched.setattr(drafter._backend, name_of_call, fail_if_called)
        with pytest.raises(ProtocolError):
            list(drafter.handle(message))
    after = [list(drafter.handle(DRAFT)), dict(drafter._lengths)]
    assert [strip(one) for one in before[0]] == [strip(one) for one in after[0]]
    assert before[1] == after[1]
    drafter.forget()


def fail_if_called(*arguments: object) -> None:
    pytest.fail(f"a backend was given {arguments}")


def strip(answer: object) -> object:
    """A tree without its times."""
    return replace(answer, draft_ms=0.0, at_ns=0) if isinstance(answer, DraftTree) else answer


EXTREMES = [
    Sampling(logits_options=LogitsOptions(repetition_penalty=0.1)),
    Sampling(logits_options=LogitsOptions(repetition_penalty=10.0), temperature=100.0),
    Sampling(
        logits_options=LogitsOptions(
            logit_bias=((20, 100.0), (21, -100.0)), frequency_penalty=-2.0, presence_penalty=-2.0
        ),
        temperature=1.1e-4,
    ),
    Sampling(temperature=100.0, top_p=1e-300),
    Sampling(temperature=1.1e-4, min_p=1.0 - 1e-12, top_k=1),
    Sampling(temperature=1.1e-4, acceptance="rejection", saguaro=0.0),
    Sampling(temperature=100.0, acceptance="rejection", saguaro=1e-300, draft_temperature=1.1e-4),
    Sampling(
        temperature=1.0,
        acceptance="rejection",
        logits_options=LogitsOptions(
            logit_bias=tuple((token, -100.0) for token in range(200)), repetition_penalty=0.1
        ),
    ),
]


@pytest.mark.parametrize("sampling", EXTREMES)
def test_extreme_settings_make_valid_messages(sampling: Sampling) -> None:
    """As far as they are legal: an invalid message would cost the drafter its place."""
    drafter = Drafter(backend_of("mlx"))
    list(drafter.handle(OpenSequence(sequence=1, tokens=PROMPT * 3, sampling=sampling)))
    length = 3 * len(PROMPT)
    prepare = Prepare(
        sequence=1,
        round=1,
        base=length,
        tokens=[],
        nodes=[20, 21, 22],
        fan_out=[3, 3, 3],
        depth=4,
        held_back=3,
    )
    draft = DraftNow(
        sequence=1, round=2, base=length, tokens=[], pending=20, accepted=0, count=4, held_back=3
    )
    found = [one for ask in (prepare, draft) for one in drafter.handle(ask) if one is not None]
    assert len(found) == 8
    for answer in found:
        assert DECODER.decode(encode(answer)) == answer
    drafter.forget()
