"""A short campaign with a fixed seed: faults of every kind, no token lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import leftovers
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

KINDS = ("drafter wrong", "garbage", "SIGKILL", "SIGSTOP and", "socket of", "vanishes", "impostor")


def test_nothing_is_lost(tmp_path: Path, run_dir: Path) -> None:
    """Faults under load: every answer is that of plain decoding, none hangs, nothing is left."""
    pair = [
        str(write_tiny_model(tmp_path / name, "llama", seed=1, noise=noise))
        for name, noise in (("target", 0.0), ("draft", 0.1))
    ]
    command = [sys.executable, "-m", "launch.cli", "chaos", "--faults", "12", "--seconds", "15"]
    command += [part for kind in KINDS for part in ("--only", kind)]
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*command, "--model", pair[0], "--draft-model", pair[1], "--json", str(report)],
        capture_output=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    outcome = json.loads(report.read_bytes())
    assert outcome["injected"] >= 3
    assert outcome["answered"] > 0
    assert leftovers(run_dir) == []
