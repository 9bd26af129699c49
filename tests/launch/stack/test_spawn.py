"""What the processes of a stack are told."""

import os
from pathlib import Path
from typing import Any

import pytest

from launch.keyring import RemoteServer
from launch.models.pair import Pair
from launch.settings.settings import StackSettings
from launch.stack.run_dir import RunDir
from launch.stack.spawn import start_drafter, start_verifier
from protocol.settings import DrafterSettings, VerifierSettings


@pytest.mark.parametrize(
    ("cores", "backend", "settings", "lends"),
    [
        ({2, 3}, "mlx", {}, True),
        ({2, 3}, "ngram", {}, True),
        ({2, 3}, "ngram", {"draft_device": "gpu"}, True),
        ({2}, "mlx", {}, False),
        ({2, 3}, "remote", {}, False),
        ({2, 3}, "mlx", {"draft_device": "gpu"}, False),
        ({2, 3}, "mlx", {"target_device": "gpu"}, False),
    ],
    ids=str,
)
def test_cores_are_lent_where_both_compute_on_cores(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], backend: Any, settings: Any, *, lends: bool
) -> None:
    """Each one's to the other; not if there is only one, nor if one of them computes elsewhere."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cores, raising=False)
    monkeypatch.setattr("launch.stack.spawn.computes_on_cpu", lambda device: not device)
    run_dir, pair = RunDir("x"), Pair("/target", "/drafter", backend)
    monkeypatch.setattr("launch.stack.spawn.Child", lambda _role, _module, told, _log: told)
    asked = StackSettings(**settings)
    verifier: Any = start_verifier(asked, pair, run_dir, 0)
    drafter: Any = start_drafter(asked, pair, run_dir, 0)
    assert isinstance(verifier, VerifierSettings)
    assert isinstance(drafter, DrafterSettings)
    flags = [
        str(run_dir.path / f"{role}-idle") if lends else "" for role in ("verifier", "drafter")
    ]
    assert [verifier.idle_flag, verifier.spare_flag] == flags
    assert [drafter.spare_flag, drafter.idle_flag] == flags
    if lends:
        assert (verifier.spare_cores, drafter.spare_cores) == (drafter.cores, verifier.cores)


@pytest.mark.parametrize(
    ("backend", "target", "draft", "prelaunches"),
    [
        ("mlx", "cuda:0", "cuda:1", True),
        ("mlx", "", "cuda:1", False),
        ("head", "cuda:0", "cuda:00", False),
        ("mlx", "cuda:0", "cpu", True),
        ("ngram", "cuda:0", "cuda:1", True),
        ("ngram", "cuda:0", "", False),
        ("stdio", "cuda:0", "cuda:1", False),
        ("remote", "", "", True),
        ("mlx", "", "", False),
        ("head", "cuda:1", "cuda:1", False),
        ("mlx", "gpu", "cuda:0", False),
        ("mlx", "cpu", "cuda:0", False),
    ],
)
def test_passes_are_launched_beforehand_where_the_drafter_is_not_on_the_card(
    monkeypatch: pytest.MonkeyPatch, backend: Any, target: str, draft: str, *, prelaunches: bool
) -> None:
    """A drafter's work on the same card would have to wait for them: both must be known."""
    monkeypatch.setattr("launch.stack.spawn.has_cuda", lambda: True)
    monkeypatch.setattr("launch.settings.machine.has_cuda", lambda: True)
    monkeypatch.setattr("launch.stack.spawn.Child", lambda _role, _module, told, _log: told)
    asked = StackSettings(target_device=target, draft_device=draft)
    pair = Pair("/target", "/drafter", backend)
    verifier: Any = start_verifier(asked, pair, RunDir("x"), 0)
    assert verifier.prelaunches == prelaunches
    monkeypatch.setattr("launch.stack.spawn.has_cuda", lambda: False)
    without: Any = start_verifier(asked, pair, RunDir("x"), 0)
    assert not without.prelaunches


@pytest.mark.parametrize(
    ("address", "prelaunches"),
    [("tcp://192.0.2.7:1", True), ("tcp://127.0.0.1:1", False), ("tcp://[::1]:1", False)],
)
def test_a_draft_server_on_this_machine_may_be_on_the_card(
    monkeypatch: pytest.MonkeyPatch, address: str, *, prelaunches: bool
) -> None:
    monkeypatch.setattr("launch.stack.spawn.has_cuda", lambda: True)
    monkeypatch.setattr("launch.settings.machine.has_cuda", lambda: True)
    monkeypatch.setattr("launch.stack.spawn.Child", lambda _role, _module, told, _log: told)
    pair = Pair("/target", "", "remote", server=RemoteServer(address, "", Path("/key")))
    verifier: Any = start_verifier(StackSettings(), pair, RunDir("x"), 0)
    assert verifier.prelaunches == prelaunches
