"""A drafter looks back on tokens that were decoded without it."""

import pytest
from msgspec.structs import replace

from protocol.messages import DraftNow, DraftTree, OpenSequence, Prepare, Sampling, Tokens
from services.drafter.backends.base import Replay
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.mlx_tree import MOST_REPLAYED
from services.drafter.drafter import Drafter
from services.drafter.sliding_context import SlidingContextBackend
from tests.support.reference import plain, tiny_folder

PROMPT = [7, 3, 9, 11, 4, 30, 8]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=5)]


def opened(sampling: Sampling) -> MlxBackend:
    """The target's own model as drafter."""
    backend = MlxBackend(tiny_folder("llama"), 16)
    for _ in backend.open(1, PROMPT, sampling):
        pass
    return backend


def spoilt(tokens: Tokens, places: tuple[int, ...]) -> Tokens:
    """With other tokens in some places."""
    return [token + 1 if at in places else token for at, token in enumerate(tokens)]


def drafted(backend: MlxBackend) -> Tokens:
    return [draft.token for draft in backend.draft(1, 5, 4) if draft is not None]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_drafter_that_is_the_target_foresees_all(sampling: Sampling) -> None:
    """The first of the tokens is not looked at: nothing is fed for the one before it."""
    answer = plain("llama", tuple(PROMPT), 20, sampling)
    found = opened(sampling).replay(1, len(PROMPT), answer)
    assert found == Replay(19, 19)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_it_drafts_on_as_after_a_commit(sampling: Sampling) -> None:
    """Nothing else has changed, whatever the tokens are."""
    answer = spoilt(plain("llama", tuple(PROMPT), 20, sampling), (3, 9))
    one, other = opened(sampling), opened(sampling)
    one.commit(1, len(PROMPT), answer)
    found = other.replay(1, len(PROMPT), answer)
    assert found is not None
    assert found.tokens == 19
    assert found.foreseen < 19
    assert drafted(one) == drafted(other)


def test_of_many_tokens_it_looks_at_the_last() -> None:
    answer = spoilt(plain("llama", tuple(PROMPT), 90, Sampling()), (5,))
    found = opened(Sampling()).replay(1, len(PROMPT), answer)
    assert found is not None
    assert found.tokens == MOST_REPLAYED - 1


def test_what_is_drawn_cannot_be_foreseen() -> None:
    sampling = Sampling(temperature=0.8, seed=5, acceptance="rejection")
    assert opened(sampling).replay(1, len(PROMPT), list(range(20, 40))) is None


def answers(drafter: Drafter, tokens: Tokens) -> list[DraftTree]:
    opening = OpenSequence(sequence=1, tokens=PROMPT, sampling=Sampling())
    assert [answer for answer in drafter.handle(opening) if answer is not None]
    asked = DraftNow(
        sequence=1, round=1, base=len(PROMPT), tokens=tokens[:-1], pending=tokens[-1],
        accepted=0, count=3,
    )  # fmt: skip
    return [answer for answer in drafter.handle(asked) if isinstance(answer, DraftTree)]


@pytest.mark.parametrize("limit", [0, 40])
def test_it_says_so_with_its_first_draft_token(limit: int) -> None:
    """Also where its context slides, as long as it need not begin anew."""
    backend = MlxBackend(tiny_folder("llama"), 16)
    backend.identity = backend.identity._replace(context_length=limit)
    drafter = Drafter(SlidingContextBackend(backend) if limit else backend)
    answer = plain("llama", tuple(PROMPT), 14, Sampling())
    first, *rest = answers(drafter, answer)
    assert (first.replayed, first.foreseen) == (12, 12)
    assert not any(tree.replayed or tree.foreseen for tree in rest)


def test_it_says_so_where_it_prepares() -> None:
    """With the first depth."""
    drafter = Drafter(MlxBackend(tiny_folder("llama"), 16))
    answer = plain("llama", tuple(PROMPT), 14, Sampling())
    answers(drafter, answer[:2])
    asked = Prepare(
        sequence=1, round=2, base=len(PROMPT), tokens=answer[:-1], nodes=answer[-1:],
        fan_out=[2], depth=2,
    )  # fmt: skip
    trees = [tree for tree in drafter.handle(asked) if isinstance(tree, DraftTree)]
    assert [(tree.replayed, tree.foreseen) for tree in trees] == [(12, 12), (0, 0)]


def test_what_it_saw_while_it_caught_up_it_says_with_the_next_draft() -> None:
    """Once, and not of a sequence that was opened anew."""
    drafter = Drafter(MlxBackend(tiny_folder("llama"), 16))
    answer = plain("llama", tuple(PROMPT), 14, Sampling())
    caught_up = DraftNow(
        sequence=1, round=1, base=len(PROMPT), tokens=answer[:-1], pending=answer[-1],
        accepted=0, count=0,
    )  # fmt: skip
    opening = OpenSequence(sequence=1, tokens=PROMPT, sampling=Sampling())
    asked = replace(caught_up, round=2, base=len(PROMPT) + 13, tokens=[], count=2)
    cases: list[tuple[list[OpenSequence | DraftNow], list[tuple[int, int]]]] = [
        ([opening, caught_up, asked], [(12, 12), (0, 0)]),
        ([asked], [(0, 0), (0, 0)]),
        ([opening, caught_up, opening, replace(asked, base=len(PROMPT))], [(0, 0), (0, 0)]),
    ]
    for messages, said in cases:
        found = [answer for message in messages for answer in drafter.handle(message)]
        trees = [tree for tree in found if isinstance(tree, DraftTree)]
        assert [(tree.replayed, tree.foreseen) for tree in trees] == said


@pytest.mark.parametrize("count", [3, 60])
def test_few_tokens_or_a_new_context_say_nothing(count: int) -> None:
    """Where it begins anew it reads the last tokens as a prompt."""
    backend = MlxBackend(tiny_folder("llama"), 16)
    backend.identity = backend.identity._replace(context_length=40)
    answer = plain("llama", tuple(PROMPT), count, Sampling())
    assert not any(
        tree.replayed for tree in answers(Drafter(SlidingContextBackend(backend)), answer)
    )
