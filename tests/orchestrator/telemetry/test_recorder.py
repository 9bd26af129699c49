"""The counts of a request, and the numbers that are made of them."""

from typing import Any

import msgspec
import pytest

from orchestrator.learning.cost_model import CostModel
from orchestrator.requests.request import Request
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.sequence import Emit, Limits, Sequence
from orchestrator.telemetry.recorder import Recorder
from orchestrator.text.stop_strings import StoppableText
from protocol.messages import DraftTree, Sampling, VerificationOutcome
from tests.support.fakes import chain_of


def test_nothing_happened_yet() -> None:
    """A request that never started has zeros, and no number is divided by nothing."""
    summary = msgspec.structs.asdict(Recorder(5.0).summarise())
    assert summary.pop("mean_acceptance_length") == 1.0
    assert not any(summary.values())


def test_times_are_of_one_clock() -> None:
    """Time to first token counts from arrival; speed counts the tokens after the first."""
    recorder = Recorder(100.0)
    recorder.count_emitted(0, 100.2)
    recorder.count_emitted(1, 100.5)
    recorder.count_emitted(4, 101.5)
    recorder.count_emitted(0, 109.0)
    recorder.count_emitted(6, 102.5)
    summary = recorder.summarise()
    assert summary.ttft_ms == pytest.approx(500.0)
    assert summary.decode_s == pytest.approx(2.0)
    assert summary.tok_s == pytest.approx(5.0)


def test_one_token_has_no_speed() -> None:
    """An answer of one token takes no decoding time, and has no speed."""
    recorder = Recorder(0.0)
    recorder.count_emitted(1, 1.0)
    assert (recorder.summarise().decode_s, recorder.summarise().tok_s) == (0.0, 0.0)


def test_acceptance_is_counted_by_position() -> None:
    """Rates are accepted over offered, in all and at each place of the draft."""
    recorder = Recorder(0.0)
    for drafted, accepted in [(0, 0), (4, 4), (4, 1), (2, 0)]:
        recorder.count_verified(chain_of([0.5] * drafted), ["hit"] * accepted, "hit")
    summary = recorder.summarise()
    assert (summary.rounds, summary.drafted, summary.accepted) == (4, 10, 5)
    assert summary.acceptance_rate == 0.5
    assert summary.mean_acceptance_length == 2.25
    assert summary.per_position == [2 / 3, 1 / 3, 1 / 2, 1 / 2]


def test_hits_have_a_rate() -> None:
    """The hit rate is hits over hits and misses."""
    recorder = Recorder(0.0, hits=3, misses=1)
    summary = recorder.summarise()
    assert (summary.cache_hits, summary.cache_misses, summary.hit_rate) == (3, 1, 0.75)


def test_phases_are_medians() -> None:
    """One slow sample does not change what a phase usually takes."""
    recorder = Recorder(0.0)
    for sample in (1.0, 2.0, 500.0):
        recorder.add_time("verify", sample)
    recorder.add_time("dispatch", 0.5)
    assert recorder.summarise().phase_ms == {"verify": 2.0, "dispatch": 0.5}


@pytest.mark.parametrize(("sequences", "rows", "told"), [(1, 0, 5), (1, 3, 3), (2, 8, 5)])
def test_a_verification_is_timed_by_what_was_looked_at(
    sequences: int, rows: int, told: int
) -> None:
    """Not by the draft tokens that a grammar ruled out before; others' tokens do not count."""
    recorder = Recorder(0.0)
    outcome = VerificationOutcome(
        sequence=1, round=1, accepted=0, bonus=5, verify_ms=7.0, idle_ms=0.0,
        sequences=sequences, rows=rows,
    )  # fmt: skip
    recorder.add_times(outcome, chain_of([0.5] * 4), "hit", 1.0)
    assert recorder.summarise().phase_ms == {"verify": 7.0, f"verify_{told}": 7.0}


@pytest.mark.parametrize(
    ("verifying_since", "expected"), [(None, 0.0), (9.0, 1.0), (9.9, 1.0), (9.95, 0.5), (10.0, 0.0)]
)
def test_drafting_hides_behind_verification(verifying_since: float | None, expected: float) -> None:
    """The overlap is the share of drafting that fell into a verification."""
    recorder = Recorder(0.0, verifying_since=verifying_since)
    recorder.add_tree(
        DraftTree(
            sequence=1, round=1, depth=1, outcomes=[], tokens=[], confidences=[], draft_ms=100.0
        ),
        10.0,
    )
    assert recorder.summarise().overlap_ratio == pytest.approx(expected)


def test_summaries_are_snapshots() -> None:
    """What is counted later does not change statistics that were sent."""
    recorder = Recorder(0.0)
    recorder.fallbacks["plain"] += 1
    before = recorder.summarise()
    recorder.fallbacks["plain"] += 1
    recorder.count_verified(chain_of([0.5] * 3), ["hit", "hit"], "hit")
    assert (before.fallbacks, before.rounds) == ({"plain": 1}, 0)


class Letters:
    """A stream in which token 1 is "a", token 2 is "b", and so on."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token - 1)


def answered(stop: str, stop_ids: frozenset[int]) -> Request:
    """An answer whose second round accepts 2, 3, 4 and adds the bonus token 5, after token 1."""
    sequence = Sequence(
        number=1,
        prompt=[9],
        sampling=Sampling(),
        limits=Limits(100, stop_ids, 0),
        planner=Planner("sd", CostModel(), 3),
        recorder=Recorder(0.0),
    )
    stream: Any = Letters()
    answer = Request(b"", 1, sequence, StoppableText(stream, [stop]), 1, 100)
    list(sequence.on_verifier_up(64))
    list(sequence.on_drafter_up(0))
    for accepted, bonus in [(0, 1), (3, 5)]:
        outcome = VerificationOutcome(
            sequence=1,
            round=sequence.round,
            accepted=accepted,
            bonus=bonus,
            verify_ms=1.0,
            idle_ms=1.0,
        )
        for action in [*sequence.decide(outcome, 1.0), *sequence.record(1.0)]:
            if isinstance(action, Emit):
                answer.add_tokens(action.tokens, action.origins)
        for depth, token in enumerate([2, 3, 4], start=1):
            tree = DraftTree(
                sequence=1,
                round=sequence.round,
                depth=depth,
                outcomes=[],
                tokens=[token],
                confidences=[1.0],
                draft_ms=1.0,
                last=depth == 3,
            )
            sequence.on_tree(tree, 1.0)
    return answer


@pytest.mark.parametrize(
    ("stop", "stop_ids", "emitted", "accepted"),
    [
        ("z", frozenset[int](), 5, 3),
        ("e", frozenset[int](), 5, 3),
        ("d", frozenset[int](), 4, 3),
        ("b", frozenset[int](), 2, 1),
        ("z", frozenset({4}), 3, 2),
        ("z", frozenset({5}), 4, 3),
        ("c", frozenset({4}), 3, 2),
        ("b", frozenset({4}), 2, 1),
        ("b", frozenset({5}), 2, 1),
    ],
)
def test_only_what_was_emitted_was_accepted(
    stop: str, stop_ids: frozenset[int], emitted: int, accepted: int
) -> None:
    """Draft tokens behind a stop string, a stop token or both are not counted as accepted."""
    recorder = answered(stop, stop_ids).sequence.recorder
    assert (emitted, accepted) == (recorder.emitted, recorder.accepted)
    assert accepted == sum(recorder.accepted_at.values())
    assert accepted == sum(kind.accepted for kind in recorder.by_origin.values())


def test_acceptance_by_lag() -> None:
    """A draft that was waited for begins at lag 1, one that was ready behind the last chain and
    its bonus token; what was looked up has none; a stop string takes back what it cuts."""
    recorder = Recorder(0.0)
    recorder.count_states(1000)  # of the prompt
    recorder.count_verified(chain_of([0.5] * 3), ["miss", "miss"], "miss")
    recorder.count_states(40)
    recorder.count_verified(chain_of([0.5] * 2), ["hit"], "hit")
    recorder.count_verified(chain_of([0.5] * 2), ["lookup"], "lookup")
    recorder.count_verified(chain_of([0.5] * 2), ["hit", "hit"], "hit")
    recorder.retract(["hit", "target"])
    statistics = recorder.summarise()
    assert statistics.offered_by_lag == [1, 1, 2, 2, 1]
    assert statistics.accepted_by_lag == [1, 1, 1, 1, 0]
    assert statistics.state_bytes == 40
