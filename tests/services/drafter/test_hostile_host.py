"""A host of another kind, or of no good will: whatever it says, the drafter answers or refuses."""

from collections.abc import Iterator
from functools import cache
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.messages import (
    CloseSequence,
    DraftNow,
    DraftTree,
    FromDrafter,
    LogitsOptions,
    OpenSequence,
    Prepare,
    Sampling,
)
from protocol.transport.codec import Decoder, encode
from services.drafter.backends.base import DraftBackend
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.ngram import NgramBackend
from services.drafter.drafter import Drafter
from services.runtime.inbox import Work
from tests.support.reference import tiny_folder
from tests.support.tiny_models import EOS, vocabulary_size

FOLDER = tiny_folder("llama")
DECODER: Decoder[FromDrafter] = Decoder(FromDrafter)
PROMPT = list(range(20, 40))

tokens = st.lists(st.integers(0, vocabulary_size() + 3), max_size=6)
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
        base=st.integers(0, 12),
        tokens=tokens,
        chain=tokens,
        fan_out=st.lists(st.integers(0, 3), max_size=6),
        depth=st.integers(0, 3),
        held_back=st.integers(0, 400),
    ),
    st.builds(
        DraftNow,
        sequence=numbers,
        round=small,
        base=st.integers(0, 12),
        tokens=tokens,
        pending=st.integers(0, vocabulary_size() + 3),
        accepted=small,
        count=st.integers(0, 3),
        held_back=st.integers(0, 400),
    ),
    st.builds(CloseSequence, sequence=numbers),
)


@cache
def backend_of(kind: str) -> DraftBackend:
    return MlxBackend(FOLDER, prefill_step_size=4) if kind == "mlx" else NgramBackend(FOLDER)


def answers(drafter: Drafter, message: Work, most: int) -> Iterator[FromDrafter]:
    """What the drafter says to a message until it is interrupted; a refusal is an answer too."""
    work = drafter.handle(message)
    try:
        yield from (answer for answer in islice(work, most) if answer is not None)  # type: ignore[misc]
    except ProtocolError:
        pass
    finally:
        work.close()


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
    for message, most in said:
        for answer in answers(drafter, message, most):
            assert DECODER.decode(encode(answer)) == answer
    assert [tree.tokens for tree in good_draft(drafter)] == expected
    drafter.forget()


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
        chain=[20, 21, 22],
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
