"""Settings that all tests share."""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from services.mlx.blas import load_blas

# The same BLAS as in the processes, before any test imports MLX.
load_blas(threads=1)

# No test knows what an earlier one learned, nor leaves anything behind.
os.environ["SSD_LEARNED_ESTIMATES"] = "false"

# Nor is each module compiled again in each process that a test starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The same examples in every run: a failure is a fact about the code, not about the day.
settings.register_profile(
    "repeatable",
    derandomize=True,
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
settings.load_profile("repeatable")


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private run folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ssd-t-") as folder:
        monkeypatch.setenv("SSD_RUN_DIR", folder)
        yield Path(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with many processes first: at the end, what is left is shared out evenly."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    costly = Counter(item.path for item in items if item.get_closest_marker("processes"))
    items.sort(key=lambda item: -costly[item.path])
