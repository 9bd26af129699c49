"""What the processes of a stack are told."""

import os
from typing import Any

import pytest

from launch.models.pair import Pair
from launch.settings.settings import StackSettings
from launch.stack.run_dir import RunDir
from launch.stack.spawn import _idle_flag


@pytest.mark.parametrize(
    ("cores", "backend", "settings", "file"),
    [
        ({2, 3}, "mlx", {}, "drafter-idle"),
        ({2, 3}, "ngram", {}, "drafter-idle"),
        ({2, 3}, "ngram", {"draft_device": "gpu"}, "drafter-idle"),
        ({2}, "mlx", {}, ""),
        ({2, 3}, "remote", {}, ""),
        ({2, 3}, "mlx", {"draft_device": "gpu"}, ""),
        ({2, 3}, "mlx", {"target_device": "gpu"}, ""),
    ],
    ids=str,
)
def test_the_drafters_core_is_lent_where_both_compute_on_cores(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], backend: Any, settings: Any, file: str
) -> None:
    """Not if there is only one, and not if the drafter computes elsewhere."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cores, raising=False)
    monkeypatch.setattr("launch.stack.spawn.computes_on_cpu", lambda device: not device)
    run_dir, pair = RunDir("x"), Pair("/target", "/drafter", backend)
    path = _idle_flag(StackSettings(**settings), pair, run_dir)
    assert path == (str(run_dir.path / file) if file else "")
