"""A short campaign with a fixed seed: faults of every kind, no token lost."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import leftovers
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

KINDS = ("drafter wrong", "garbage", "SIGKILL", "SIGSTOP and", "socket of", "vanishes", "impostor")


def test_nothing_is_lost(tmp_path: Path, run_dir: Path) -> None:
    """Faults under load: every answer is that of plain decoding, none hangs, nothing is left."""
    kinds = [part for kind in KINDS for part in ("--only", kind)]
    outcome = outcome_of(tmp_path, "chaos", "--faults", "8", *kinds)
    assert outcome["injected"] == 8
    assert outcome["answered"] > 0
    assert leftovers(run_dir) == []


def test_a_soak_counts_and_weighs(tmp_path: Path, run_dir: Path) -> None:
    """Seconds of an hour's soak: answers and cancels counted, every process weighed."""
    outcome = outcome_of(tmp_path, "soak", "--minutes", "0.1", "--cancels", "0.5", "--every", "0.2")
    assert outcome["answered"] > 0
    assert outcome["replaced"] == []
    assert set(outcome["processes"]) == {"orchestrator", "verifier", "drafter", "supervisor"}
    assert all(one["mb_late"] > 1 for one in outcome["processes"].values())
    assert leftovers(run_dir) == []


def test_a_hostile_load_hurts_no_bystander(tmp_path: Path, run_dir: Path) -> None:
    """Seconds of an hour of attacks: their kinds counted, and no process was replaced."""
    flags = ("--minutes", "0.1", "--quiet-minutes", "0.02", "--clients", "2", "--no-drafters")
    flags += ("--crowd-seconds", "1", "--only", "deep nesting")
    outcome = outcome_of(tmp_path, "hostile", *flags)
    assert outcome["answered"] > 0
    assert outcome["replaced"] == []
    assert sum(one["sent"] for one in outcome["attacks"].values()) > 0
    assert leftovers(run_dir) == []


def outcome_of(folder: Path, verb: str, *flags: str) -> dict[str, Any]:
    """What a run of this verb on a tiny pair wrote; it must have ended well."""
    pair = [
        str(write_tiny_model(folder / name, "llama", seed=1, noise=noise))
        for name, noise in (("target", 0.0), ("draft", 0.1))
    ]
    report = folder / "report.json"
    models = ("--model", pair[0], "--draft-model", pair[1], "--json", str(report))
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", verb, *flags, *models],
        capture_output=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    outcome: dict[str, Any] = json.loads(report.read_bytes())
    return outcome
