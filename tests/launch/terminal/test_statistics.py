"""What `--stats` prints, and what every reader of an answer is told."""

import re
from typing import Any

import msgspec
import pytest

from launch.terminal.generate import notes
from launch.terminal.statistics import count_accepted, statistics_table
from protocol.messages import Finished, FinishReason, Generate, RoundStats, Statistics
from tests.launch.terminal.test_explain import statistics


def finished(s: Statistics, reason: FinishReason = "stop", **values: Any) -> Finished:
    return Finished(request=1, reason=reason, prompt_tokens=30, statistics=s, **values)


def rows(end: Finished, tokens: int = 20, **options: Any) -> dict[str, str]:
    names, values = statistics_table(end, tokens, **options).columns
    return dict(zip(map(str, names.cells), map(str, values.cells), strict=True))


BOTH = statistics(
    rounds=12, tok_s=30.0, decode_s=2.0, plain_tok_s=20.0, plain_age_s=40.0, drafted=19, accepted=8,
    mean_acceptance_length=1.67,
    phase_ms={"prefill_verifier": 100.0, "verify": 40.0},
    by_origin={
        "hit": RoundStats(rounds=5, accepted=5, drafted=8),
        "miss": RoundStats(rounds=3, accepted=2, drafted=4),
        "lookup": RoundStats(rounds=2, accepted=1, drafted=7),
    },
)  # fmt: skip


def test_lookups_are_not_the_drafters_merit() -> None:
    """Tokens that were looked up stand in a row of their own."""
    assert count_accepted(BOTH, ("hit", "miss")) == (7, 12)
    shown = rows(finished(BOTH))
    assert shown["drafts"] == "7 of 12 (0.58) accepted"
    assert shown["prompt lookup"] == "1 of 7 (0.14) accepted"


def test_what_everybody_prints() -> None:
    """Prompt and its speed without what was cached, answer, memory, and times plain decoding."""
    shown = rows(finished(BOTH, cached_tokens=10), memory="1.0 GB")
    assert shown["prompt"] == "30 tokens, 10 of them cached, 190.0 tok/s"
    assert shown["answer"] == "20 tokens, 30.0 tok/s (2.00 s)"
    assert shown["times plain"] == "1.50 (plain decoding: 20.0 tok/s, measured 40 s ago)"
    assert shown["peak memory"] == "1.0 GB"
    assert "by position" not in shown


def test_what_a_drafter_reads_of_the_target_is_printed() -> None:
    """Which drafter, how much of the target's states a round took, and acceptance by lag."""
    read = statistics(
        rounds=4, drafter="head H", state_bytes=64_000, drafted=6, accepted=3,
        by_origin={"hit": RoundStats(rounds=4, accepted=3, drafted=6)},
        offered_by_lag=[4, 0, 2], accepted_by_lag=[3, 0, 0],
    )  # fmt: skip
    shown = rows(finished(read), details=True)
    assert shown["drafts"] == "3 of 6 (0.50) accepted (head H)"
    assert shown["states read"] == "16.0 kB a round"
    assert shown["by lag"] == "1: 0.75 3: 0.00"
    assert "states read" not in rows(finished(BOTH))


def test_a_speed_that_was_not_measured_is_not_stated() -> None:
    """Without plain rounds nearby there is nothing to compare with."""
    assert "times plain" not in rows(finished(statistics(rounds=3, tok_s=9.0, drafted=4)))


def test_a_prompt_that_was_not_computed_has_no_speed() -> None:
    """With all but the last token cached the prefill computes nothing."""
    assert rows(finished(BOTH, cached_tokens=29))["prompt"] == "30 tokens, 29 of them cached"


def test_a_gain_that_drafts_cannot_explain_is_not_stated() -> None:
    """1.5 times plain decoding at 1.01 tokens a round: the machine was slower before."""
    other = msgspec.structs.replace(BOTH, mean_acceptance_length=1.01)
    assert "times plain" not in rows(finished(other))


def test_phases_stand_in_their_order() -> None:
    """Not as they came up: those of one kind together, by their number."""
    phases = {"verify_10": 1.0, "draft_2": 2.0, "verify": 3.0, "verify_2": 4.0, "draft_1": 5.0}
    shown = rows(finished(statistics(phase_ms=phases)), details=True)
    assert re.findall(r"(\w+) \d", shown["per round, median ms"]) == [
        "draft_1", "draft_2", "verify", "verify_2", "verify_10",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (finished(BOTH, "length"), "stopped after 64 tokens (--max-tokens)"),
        (finished(BOTH, "context"), "stopped: the model's context is full"),
        (finished(statistics(rounds=9, fallbacks={"no_drafter": 8})), "no drafter in 8 of 9"),
    ],
)
def test_notes(end: Finished, sentence: str) -> None:
    """An answer that was cut says so, and so does one without its drafter."""
    [note] = notes(end, Generate(request=1, max_tokens=64))
    assert sentence in note


def test_an_answer_without_incidents_has_no_notes() -> None:
    """Nor is a missing drafter worth a word where none was asked for."""
    alone = finished(statistics(rounds=9, fallbacks={"no_drafter": 9}))
    assert list(notes(finished(BOTH), Generate(request=1))) == []
    assert list(notes(alone, Generate(request=1, mode="ar"))) == []
