"""A trace says who did what when: valid, complete, and nobody does two things at once."""

import json
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launch.terminal.trace import write_trace
from orchestrator.telemetry.timeline import Timeline
from protocol.errors import UsageError
from protocol.messages import DraftTree, TraceEvent, VerificationOutcome
from tests.support.stack import DEADLINE_S, eventually
from tests.support.tiny_models import write_tiny_model


def tree(at_ns: int) -> DraftTree:
    return DraftTree(
        sequence=1,
        round=3,
        depth=2,
        outcomes=[],
        tokens=[1, 2, 3],
        confidences=[0.5, 0.5, 0.5],
        draft_ms=20.0,
        at_ns=at_ns,
    )


@pytest.mark.parametrize(
    ("at_s", "ended"), [(99.9, 99.9), (96.0, 96.0), (0.0, 100.0), (7.0, 100.0), (5e5, 100.0)]
)
def test_a_slice_ends_when_its_process_says(at_s: float, ended: float) -> None:
    """Unless its clock is unknown, or evidently another machine's: then when the message came."""
    timeline = Timeline()
    timeline.add_draft(tree(round(at_s * 1e9)), now=100.0)
    [found] = timeline.events
    assert (found.track, found.name) == ("drafter", "depth 2")
    assert found.details == {"round": 3, "depth": 2, "branches": 3}
    assert found.start_us == pytest.approx(1e6 * (ended - 0.02))
    assert found.duration_us == pytest.approx(2e4)


def test_a_verification_tells_its_outcome() -> None:
    """How many tokens were verified and accepted, and where the chain came from."""
    timeline = Timeline()
    outcome = VerificationOutcome(
        sequence=1, round=3, accepted=2, bonus=9, verify_ms=40.0, idle_ms=1.0
    )
    timeline.add_verification(outcome, tokens=4, depth=2, origin="hit", now=1.0)
    [found] = timeline.events
    assert found.details == {"round": 3, "m": 4, "depth": 2, "accepted": 2, "chain": "hit"}


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


def test_gaps_of_the_verifier_are_idle(tmp_path: Path) -> None:
    """Whatever the order of the slices, the file has them by time, and the waits between."""
    work = [
        TraceEvent(track="verifier", name="verify", start_us=start, duration_us=10.0)
        for start in (50.0, 0.0, 10.0)
    ]
    work.append(TraceEvent(track="drafter", name="depth 1", start_us=5.0, duration_us=3.0))
    write_trace(tmp_path / "trace.json", work)
    found = [(e["name"], e["ts"], e["dur"]) for e in events(tmp_path / "trace.json") if "ts" in e]
    assert sorted(found) == [
        ("depth 1", 5.0, 3.0),
        ("idle", 20.0, 30.0),
        ("verify", 0.0, 10.0),
        ("verify", 10.0, 10.0),
        ("verify", 50.0, 10.0),
    ]


def test_a_trace_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """The message names the file."""
    with pytest.raises(UsageError, match="no-such-folder"):
        write_trace(tmp_path / "no-such-folder" / "trace.json", [])


@pytest.mark.processes
@pytest.mark.usefixtures("run_dir")
def test_a_real_answers_trace(tmp_path: Path) -> None:
    """`ssd generate --trace`: all verifications, on one clock; tracks do not overlap."""
    pair = [str(write_tiny_model(tmp_path / name, "llama", seed=1)) for name in "td"]
    file = tmp_path / "trace.json"
    command = [sys.executable, "-m", "launch.cli", "generate", "Say it again.", "--json"]
    options = ["--model", pair[0], "--draft-model", pair[1], "-m", "240", "--trace", str(file)]
    options += ["--num-draft-tokens", "4"]  # the planner might not speculate at all
    runs: list[tuple[float, dict[str, Any], float]] = []

    def is_drafted() -> bool:
        begun = 1e6 * time.monotonic()
        ran = subprocess.run(
            [*command, *options], capture_output=True, check=True, timeout=DEADLINE_S
        )
        runs.append((begun, json.loads(ran.stdout)["stats"], 1e6 * time.monotonic()))
        return any(e["name"] == "depth 1" for e in events(file))

    eventually(is_drafted, "drafts come in time")
    begun, statistics, ended = runs[-1]
    names = {e["pid"]: e["args"]["name"] for e in events(file) if e["ph"] == "M"}
    assert set(names.values()) == {"orchestrator", "verifier", "drafter"}
    slices = [e for e in events(file) if e["ph"] == "X"]
    for track in names:
        own = sorted((e for e in slices if e["pid"] == track), key=lambda e: e["ts"])
        assert all(begun < e["ts"] <= e["ts"] + e["dur"] < ended for e in own)
        for before, after in pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1.0
    counts = Counter((names[e["pid"]], e["name"]) for e in slices)
    assert counts["verifier", "prefill"] == counts["drafter", "prefill"] == 1
    verified = [e["args"] for e in slices if e["name"] == "verify"]
    assert len(verified) == statistics["rounds"]
    assert sum(args["m"] - 1 for args in verified) == statistics["drafted"]
    hits = sum(args["chain"] == "hit" for args in verified)
    assert counts["orchestrator", "dispatch"] == hits == statistics["cache_hits"]
    assert counts["verifier", "idle"] > 0
