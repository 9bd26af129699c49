"""Models whose layers hold windows, recurrent states and the like: drafts change no token."""

from functools import cache
from itertools import count, cycle

import mlx.core as mx
import pytest

from protocol.messages import (
    CloseSequence,
    OpenSequence,
    Prefilled,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.kv.prefix_cache import PrefixCache
from services.mlx import launching
from services.mlx.loader import LoadedModel, load
from services.verifier.verifier import Verifier
from tests.support.families.attention import NESTED, WINDOWED
from tests.support.families.layered import LAYERED
from tests.support.families.parts import WINDOW
from tests.support.families.recurrent import CONVOLUTIONS, DELTA_NETS, FED_AGAIN, MAMBAS
from tests.support.reference import plain, said, tiny_folder, tiny_verifier

PROMPT = (0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64)
LENGTH = 5 * WINDOW + 8
SAMPLINGS = (Sampling(), Sampling(temperature=0.7, seed=5))
NUMBERS = count(1)
MUCH = 2**40
REPRESENTATIVES = ("qwen3_5", "lfm2", "granite4", "falcon_h1", "jamba", "gpt_oss", "llama4")
"""One family of each kind of state."""
APART = ("jamba", "llama4")
"""Those of them whose sequences share no pass."""


@cache
def model_of(family: str) -> LoadedModel:
    return load(tiny_folder(family))


def verifier_of(family: str, step: int = 512) -> Verifier:
    return tiny_verifier(family, step, PrefixCache(10, MUCH))


class Answer:
    """One request whose drafts are partly right."""

    def __init__(self, verifier: Verifier, prompt: Tokens, sampling: Sampling) -> None:
        self.verifier, self.number, self.tokens = verifier, next(NUMBERS), list(prompt)
        *_, opened = said(verifier.handle(self.opening(prompt, sampling)))
        assert isinstance(opened, Prefilled)
        self.cached = opened.cached
        self.rounds = 0

    def opening(self, prompt: Tokens, sampling: Sampling) -> OpenSequence:
        return OpenSequence(sequence=self.number, tokens=prompt[:-1], sampling=sampling)

    def verify(self, rest: Tokens, right: int, wrong: int) -> None:
        """A draft of `right` tokens that stand and `wrong` ones that do not."""
        right = min(right, len(rest) - 1)
        draft = rest[:right] + [(rest[right] + 1) % 288] * wrong
        self.rounds += 1
        asked = Verify(
            sequence=self.number,
            round=self.rounds,
            position=len(self.tokens) - 1,
            nodes=[self.tokens[-1], *draft],
        )
        [outcome] = said(self.verifier.handle(asked))
        assert isinstance(outcome, VerificationOutcome)
        assert (right, rest[right]) == (outcome.accepted, outcome.bonus)
        self.tokens += [*draft[: outcome.accepted], outcome.bonus]

    def finish(self, expected: Tokens, drafts: tuple[tuple[int, int], ...]) -> None:
        """All tokens are the expected ones, whatever was drafted round by round."""
        rest = list(expected)
        while rest:
            before = len(self.tokens)
            self.verify(rest, *drafts[self.rounds % len(drafts)])
            rest = rest[len(self.tokens) - before :]

    def close(self) -> None:
        list(self.verifier.handle(CloseSequence(sequence=self.number)))


DRAFTS = ((0, 3), (2, 1), (3, 0), (1, 4), (0, 0), (4, 0), (0, 1))
"""Right and wrong tokens of each draft; about three of four rounds end in a rejection."""


@pytest.mark.parametrize(
    ("families", "way"),
    [
        (DELTA_NETS, "replay"),
        (CONVOLUTIONS, "replay"),
        (MAMBAS, "replay"),
        (FED_AGAIN, "refeed"),
        (WINDOWED, "windows"),
        (NESTED, "slots"),
    ],
    ids=["delta nets", "convolutions", "Mamba-2", "fed again", "windows", "nested"],
)
@pytest.mark.wide
def test_each_family_goes_back_in_the_fastest_way(families: dict[str, object], way: str) -> None:
    """It is proved when the model is loaded."""
    assert {verifier_of(family).target.states.way for family in families} == {way}


@pytest.mark.parametrize(
    ("family", "sampling"),
    list(zip(LAYERED, cycle(SAMPLINGS), strict=False)),
    ids=[
        f"{family}-{law}"
        for family, law in zip(LAYERED, cycle(("greedy", "sampled")), strict=False)
    ],
)
def test_drafts_change_no_token(family: str, sampling: Sampling) -> None:
    """Right and wrong drafts, until a window has been passed five times over."""
    answer = Answer(verifier_of(family), list(PROMPT), sampling)
    expected = plain(family, PROMPT, LENGTH, sampling)
    answer.finish(expected, DRAFTS)
    assert answer.rounds < len(expected)


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_passes_in_pieces_change_no_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where MLX makes one graph of a pass: each piece is of layers whose states have arrays."""
    verifier, pieces = verifier_of(family), list[int]()
    begin = launching.launch

    def launch(arrays: list[mx.array]) -> None:
        pieces.append(len(arrays))
        begin(arrays)

    # Not `async_eval`: on a GPU what a pass results in is launched by itself, too.
    monkeypatch.setattr(launching, "launch", launch)
    for runner in (verifier.scheduler.runner, verifier._chunked_prefill.runner):
        runner.one_graph = True
    answer = Answer(verifier, list(PROMPT), Sampling())
    answer.finish(plain(family, PROMPT, LENGTH, Sampling()), DRAFTS)
    assert len(pieces) > answer.rounds
    assert min(pieces) >= 2


@pytest.mark.parametrize("family", [*FED_AGAIN, "hybrid", "mamba"])
def test_what_is_fed_again_is_bounded(family: str) -> None:
    """Rejection after rejection: the tokens that stand are caught up with in between."""
    answer = Answer(verifier_of(family), list(PROMPT), Sampling())
    answer.finish(plain(family, PROMPT, LENGTH, Sampling()), ((1, 2), (2, 2)))
    assert answer.verifier._sequences[answer.number].state.owed <= 16 + 3


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_sequences_do_not_disturb_one_another(family: str) -> None:
    """Two that wait at the same time, round by round; each gets its own tokens."""
    verifier, prompts = verifier_of(family), (PROMPT, PROMPT[3:9])
    answers = [Answer(verifier, list(prompt), Sampling()) for prompt in prompts]
    rests = [list(plain(family, prompt, 24, Sampling())) for prompt in prompts]
    for right, wrong in ((2, 1), (0, 2), (1, 0), (3, 2)):
        asked = []
        for answer, rest in zip(answers, rests, strict=True):
            chain = [answer.tokens[-1], *rest[:right], *[(rest[right] + 1) % 288] * wrong]
            position = len(answer.tokens) - 1
            asked.append(Verify(sequence=answer.number, round=1, position=position, nodes=chain))
        work = [verifier.handle(message) for message in asked]
        assert [next(outcomes) for outcomes in work] == [None, None]
        for outcomes, answer, rest in zip(work, answers, rests, strict=True):
            [outcome] = said(outcomes)
            assert isinstance(outcome, VerificationOutcome)
            assert (right, rest[right]) == (outcome.accepted, outcome.bonus)
            assert outcome.sequences == (1 if family in APART else 2)
            answer.tokens += rest[: right + 1]
            del rest[: right + 1]


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_a_prompt_is_resumed(family: str) -> None:
    """Asked again, continued after its answer, or changed near its end: the same tokens."""
    verifier = verifier_of(family, 4)
    first = Answer(verifier, list(PROMPT), Sampling())
    expected = plain(family, PROMPT, 12, Sampling())
    first.finish(expected, DRAFTS)
    first.close()
    again = Answer(verifier, list(PROMPT), Sampling())
    assert again.cached == len(PROMPT) - 1
    again.finish(expected, DRAFTS)
    again.close()
    longer = (*first.tokens, 50, 60, 70)
    turn = Answer(verifier, list(longer), Sampling())
    assert turn.cached > len(PROMPT)
    turn.finish(plain(family, longer, 9, Sampling()), DRAFTS)
    changed = (*PROMPT[:9], 99, 98, 97)
    other = Answer(verifier, list(changed), Sampling())
    assert other.cached >= 8
    other.finish(plain(family, changed, 9, Sampling()), DRAFTS)


@pytest.mark.parametrize("family", [name for name in REPRESENTATIVES if name != "gpt_oss"])
def test_a_resumed_prompt_has_the_bits_of_a_fresh_one(family: str) -> None:
    """Its chunks end where a fresh prompt's do. (A window is cut anywhere, like slots.)"""
    changed = (*PROMPT[:9], 99, 98, 97, 11, 12)
    states = []
    for history in ([PROMPT], []):
        verifier = verifier_of(family, 4)
        for prompt in history:
            Answer(verifier, list(prompt), Sampling()).close()
        answer = Answer(verifier, list(changed), Sampling())
        assert answer.cached == (8 if history else 0)
        states.append(verifier._sequences[answer.number].state.dump(len(changed) - 1))
    resumed, fresh = states
    assert resumed.keys() == fresh.keys()
    assert all(bool(mx.array_equal(resumed[name], fresh[name])) for name in fresh)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "jamba"])
def test_the_next_turn_of_a_chat_finds_the_last_one(family: str) -> None:
    """Its messages, but not the answer, which a template may write otherwise."""
    end, step = 7, 32
    model = model_of(family)._replace(end_ids=frozenset({end}))
    verifier = Verifier(model, step, PrefixCache(10, MUCH))
    asked = [*PROMPT, end, *PROMPT[1:], end]
    first = Answer(verifier, [*asked, 5, 6, 9], Sampling())
    first.finish(plain(family, tuple(first.tokens), 12, Sampling()), DRAFTS)
    first.close()
    longer = (*asked, 5, 21, 22, end, *PROMPT[2:9], end, 5, 6, 9)
    second = Answer(verifier, list(longer), Sampling())
    assert second.cached == len(asked)
    second.finish(plain(family, longer, 12, Sampling()), DRAFTS)
    fresh = Verifier(model, step, PrefixCache(10, MUCH))
    third = Answer(fresh, list(longer), Sampling())
    states = [v._sequences[a.number].state for v, a in ((fresh, third),)]
    again = Answer(verifier, list(longer), Sampling())
    states.append(verifier._sequences[again.number].state)
    count = len(longer) - 1
    one, other = (state.fork(count).dump(count) for state in states)
    assert all(bool(mx.array_equal(one[name], other[name])) for name in one if name != "points")


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_a_cancelled_prefill_is_not_lost(family: str) -> None:
    """Who asks again goes on where the first one stopped."""
    verifier = verifier_of(family, 4)
    opening = verifier.handle(
        OpenSequence(sequence=10**6, tokens=list(PROMPT[:-1]), sampling=Sampling())
    )
    assert [next(opening) for _ in range(4)] == [None] * 4
    opening.close()
    answer = Answer(verifier, list(PROMPT), Sampling())
    assert answer.cached == 8
    answer.finish(plain(family, PROMPT, 12, Sampling()), DRAFTS)


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss", "jamba"])
def test_a_pass_that_fails_leaves_the_sequence_as_it_was(family: str) -> None:
    """In the middle of the layers: those that were through go back with the others."""
    verifier = verifier_of(family)
    answer = Answer(verifier, list(PROMPT), Sampling())
    expected = plain(family, PROMPT, 16, Sampling())
    answer.finish(expected[:5], DRAFTS)
    model = verifier._model
    layers = (model.layers if hasattr(model, "layers") else model.model.layers)[1:]
    last = layers[-1]
    kind = type(last)
    broken = type("Broken", (kind,), {"__call__": lambda *_, **__: 1 / 0})
    last.__class__ = broken
    try:
        with pytest.raises(ZeroDivisionError):
            answer.verify(expected[len(answer.tokens) - len(PROMPT) :], 2, 1)
    finally:
        last.__class__ = kind
    answer.finish(expected[len(answer.tokens) - len(PROMPT) :], DRAFTS)
