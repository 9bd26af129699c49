"""Whole answers have the law of plain decoding, whatever happens on the way."""

from collections import Counter
from itertools import product
from typing import get_args

import pytest

from protocol.messages import Acceptance, Mode, Sampling
from tests.support.chi_square import assert_law
from tests.support.markov import Answering, Setting, law_of_answers

MODES: tuple[Mode, ...] = get_args(Mode)
ACCEPTANCES: tuple[Acceptance, ...] = get_args(Acceptance)
LENGTH = 4
ANSWERS = 1200
REJECTION = Sampling(temperature=1.0, acceptance="rejection")
SAGUARO = Sampling(temperature=1.0, acceptance="rejection", saguaro=0.3)
MIXED = Sampling(
    temperature=0.8, min_p=0.02, acceptance="rejection", draft_temperature=1.6, saguaro=0.5
)
QUOTED = (0, 0, 1, 1, 2, 2, 0, 2, 1, 0)
"""Every pair of tokens was said before: there is always something to look up."""
SETTINGS = {
    "coupled": Setting(Sampling(temperature=0.9, draft_temperature=2.0), deaths=0.05),
    "ar": Setting(REJECTION, mode="ar"),
    "sd": Setting(REJECTION, mode="sd"),
    "sd of 2": Setting(REJECTION, mode="sd", num_draft_tokens=2, width=2),
    "ssd": Setting(REJECTION),
    "ssd, deaths": Setting(REJECTION, deaths=0.15),
    "saguaro": Setting(SAGUARO, num_draft_tokens=3),
    "saguaro, two of three": Setting(SAGUARO, width=2, deaths=0.05),
    "mixed": Setting(MIXED),
    "lookup": Setting(REJECTION, drafter=False, deaths=0.1, prompt=QUOTED),
    "lookup, coupled": Setting(Sampling(temperature=0.9), drafter=False, prompt=QUOTED),
    "lookup or draft": Setting(REJECTION, budget=2, prompt=QUOTED),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.wide
def test_answers_follow_the_targets_law(setting: Setting) -> None:
    """The first tokens of many answers, jointly, are those of plain decoding (chi-square)."""
    counts = Counter(Answering(setting, seed).run(LENGTH) for seed in range(ANSWERS))
    assert_law(counts, law_of_answers(setting.sampling, LENGTH))


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_laws_that_cannot_be_cost_speed_only(num_draft_tokens: int) -> None:
    """A hostile drafter's nonsense is never shown to the target, which decodes plainly.

    With a lookahead fixed by hand: else something may be looked up, which draws other tokens.
    """
    for seed in range(60):
        plain = Answering(Setting(SAGUARO, mode="ar"), seed)
        hostile = Answering(Setting(SAGUARO, num_draft_tokens=num_draft_tokens, hostile=True), seed)
        assert plain.run(6) == hostile.run(6)
        assert hostile.sequence.recorder.drafted == 0


@pytest.mark.parametrize("setting", [SETTINGS["ssd"], SETTINGS["saguaro"]], ids=str)
def test_drafts_are_accepted_and_hit(setting: Setting) -> None:
    """Prepared drafts are found and used: the laws above are not those of plain decoding alone."""
    answers = [Answering(setting, seed) for seed in range(40)]
    for answer in answers:
        answer.run(20)
    recorders = [answer.sequence.recorder for answer in answers]
    hits, misses = sum(r.hits for r in recorders), sum(r.misses for r in recorders)
    assert hits / (hits + misses) > 0.3
    assert sum(r.accepted for r in recorders) / sum(r.drafted for r in recorders) > 0.5


def test_what_is_looked_up_is_offered_and_accepted() -> None:
    """The laws above with lookup are not those of plain decoding alone."""
    answers = [Answering(SETTINGS["lookup"], seed) for seed in range(40)]
    for answer in answers:
        answer.run(12)
    kinds = [answer.sequence.recorder.by_origin["lookup"] for answer in answers]
    assert sum(kind.rounds for kind in kinds) > 100
    assert sum(kind.accepted for kind in kinds) > 40


def test_both_rules_are_one_at_temperature_zero() -> None:
    """A greedy answer is the same under both, in every mode."""
    for seed, mode in product(range(5), MODES):
        coupled, rejection = (
            Answering(Setting(Sampling(acceptance=acceptance), mode=mode), seed).run(12)
            for acceptance in ACCEPTANCES
        )
        assert coupled == rejection
