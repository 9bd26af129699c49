"""The sentences of `--explain` say what the statistics say."""

from typing import Any

import msgspec
import pytest

from launch.terminal.explain import explanation
from orchestrator.telemetry.recorder import Recorder
from protocol.messages import RoundStats, Schedule, Statistics


def statistics(**values: Any) -> Statistics:
    return msgspec.structs.replace(Recorder(0.0).summarise(), **values)


SPECULATIVE = statistics(
    rounds=60,
    drafted=80,
    accepted=40,
    cache_hits=30,
    cache_misses=10,
    hit_rate=0.75,
    tok_s=25.0,
    mean_acceptance_length=2.0,
    offered_per_position=[40, 40],
)


def test_speculation_is_described() -> None:
    """How many rounds, how long the drafts, how often they were ready, how fast it was."""
    measured = msgspec.structs.replace(SPECULATIVE, plain_tok_s=20.0, plain_age_s=240.0)
    text = explanation("ssd", measured)
    assert "40 of 60 rounds verified a draft" in text
    assert "2.0 tokens on average, of which 1.0 were accepted" in text
    assert "75%" in text
    assert text.endswith("Measured 25.0 tok/s, plain decoding 20.0 (measured 4 min ago).")


@pytest.mark.parametrize(
    ("plain_rounds", "reason"),
    [(4, "measured what speculation has to beat"), (40, "not worth its verification")],
)
def test_plain_rounds_have_a_reason(plain_rounds: int, reason: str) -> None:
    """A few measure plain decoding; many mean that drafts did not pay."""
    text = explanation("ssd", msgspec.structs.replace(SPECULATIVE, plain_rounds=plain_rounds))
    assert reason in text


def test_nothing_speculative_is_said_so() -> None:
    """Neither plain decoding as asked, nor without a drafter, nor by choice, divides by zero."""
    assert "as asked" in explanation("ar", statistics(rounds=9))
    alone = statistics(rounds=9, fallbacks={"no_drafter": 8})
    assert "no drafter" in explanation("ssd", alone)
    assert "All rounds were plain" in explanation("ssd", statistics(rounds=9, plain_rounds=9))


@pytest.mark.parametrize(
    ("rounds", "tokens", "sentence"),
    [
        (1, 2, "In 1 round the draft was looked up in prompt and answer: 1 of 1 token accepted."),
        (3, 3, "In 3 rounds the draft was looked up in prompt and answer: 0 of 5 tokens accepted."),
    ],
)
def test_one_is_one(rounds: int, tokens: int, sentence: str) -> None:
    """A single round is not `1 rounds`."""
    kinds = {"lookup": RoundStats(rounds=rounds, accepted=tokens - rounds, drafted=2 * rounds - 1)}
    text = explanation("ssd", msgspec.structs.replace(SPECULATIVE, by_origin=kinds, plain_rounds=1))
    assert sentence in text
    assert "1 plain round measured" in text


def test_what_was_planned_comes_first() -> None:
    """The schedule before the first round and its reasons; or that nothing was known."""
    times = {1: 37.0, 4: 39.0}
    planned = Schedule("in turn", 4, 1.98, times, draft_ms=3.02, acceptance=0.85)
    text = explanation("ssd", msgspec.structs.replace(SPECULATIVE, planned=planned))
    assert text.startswith(
        "Planned: drafts of 4 in turn, 1.98 times plain decoding (passes by their tokens 1: 37.0, "
        "4: 39.0 ms, a drafted token 3.0, acceptance 0.85). 40 of 60 rounds"
    )
    unplanned = msgspec.structs.replace(SPECULATIVE, drafter="mlx small")
    assert explanation("ssd", unplanned).startswith("Nothing was planned")
    assert explanation("ssd", SPECULATIVE).startswith("40 of 60")


def test_a_useless_drafter_is_described() -> None:
    """Rounds without a draft are not called speculative, and nothing is divided by zero."""
    useless = statistics(rounds=15, fallbacks={"plain": 14}, tok_s=9.0)
    text = explanation("ssd", useless)
    assert text.startswith("No draft was verified in 15 rounds: in 14 of them none was ready")
    assert "speculative" not in text
