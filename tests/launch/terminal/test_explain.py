"""The sentences of `--explain` say what the statistics say."""

import io
import re
from typing import Any

import msgspec
import pytest
from rich.console import Console

from launch.terminal.console import statistics_table
from launch.terminal.explain import explanation
from orchestrator.telemetry.recorder import Recorder
from protocol.messages import RoundStats, Statistics


def statistics(**values: Any) -> Statistics:
    return msgspec.structs.replace(Recorder(0.0).summarise(), **values)


SPECULATIVE = statistics(
    rounds=60, drafted=80, accepted=40, cache_hits=30, cache_misses=10, hit_rate=0.75, tok_s=25.0
)


def test_speculation_is_described() -> None:
    """How many rounds, how long the drafts, how often they were ready, how fast it was."""
    measured = msgspec.structs.replace(SPECULATIVE, predicted_tok_s=24.0, plain_tok_s=20.0)
    text = explanation("ssd", measured)
    assert "60 of 60 rounds" in text
    assert "1.3 draft tokens were verified and 0.7 accepted" in text
    assert "75%" in text
    assert text.endswith("Predicted 24.0, measured 25.0 tok/s, plain decoding 20.0.")


@pytest.mark.parametrize(
    ("plain_rounds", "reason"),
    [(4, "measured what speculation has to beat"), (40, "not worth its verification")],
)
def test_plain_rounds_have_a_reason(plain_rounds: int, reason: str) -> None:
    """A few measure plain decoding; many mean that drafts did not pay."""
    text = explanation("ssd", msgspec.structs.replace(SPECULATIVE, plain_rounds=plain_rounds))
    assert f"{60 - plain_rounds} of 60" in text
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
        (1, 2, "In 1 round a draft was looked up in prompt and answer instead; 1 token of it was"),
        (3, 3, "In 3 rounds a draft was looked up in prompt and answer instead; 0 tokens of these"),
    ],
)
def test_one_is_one(rounds: int, tokens: int, sentence: str) -> None:
    """A single round is not `1 rounds`."""
    kinds = {"lookup": RoundStats(rounds=rounds, tokens=tokens)}
    text = explanation("ssd", msgspec.structs.replace(SPECULATIVE, by_origin=kinds, plain_rounds=1))
    assert sentence in text
    assert "1 plain round measured" in text


def test_phases_stand_in_their_order() -> None:
    """Not as they came up: those of one kind together, by their number."""
    phases = {"verify_10": 1.0, "draft_2": 2.0, "verify": 3.0, "verify_2": 4.0, "draft_1": 5.0}
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(statistics_table(statistics(phase_ms=phases)))
    assert isinstance(console.file, io.StringIO)
    row = next(line for line in console.file.getvalue().splitlines() if "median" in line)
    assert re.findall(r"\w+_?\d*(?= \d\.)", row) == [
        "draft_1", "draft_2", "verify", "verify_2", "verify_10",
    ]  # fmt: skip
