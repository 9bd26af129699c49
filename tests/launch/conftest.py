"""Fixtures of the command line's tests."""

from pathlib import Path

import msgspec
import pytest

from launch.workers import layers
from services.tools.layers import describe_layers


@pytest.fixture
def layers_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe a model's layers without a process, whose start takes longer than all else."""

    def describe(_title: str, _module: str, folder: str, *, timeout_s: float) -> bytes:
        return msgspec.json.encode(describe_layers(Path(folder)))

    monkeypatch.setattr(layers, "run_module", describe)
