"""Settings that all tests share."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from services.mlx.blas import load_blas

# The same BLAS as in the processes, before any test imports MLX.
load_blas(threads=1)

# No test knows what an earlier one learned, nor leaves anything behind.
os.environ["SSD_LEARNED_ESTIMATES"] = "false"

# The same examples in every run: a failure is a fact about the code, not about the day.
settings.register_profile(
    "repeatable", derandomize=True, max_examples=40, deadline=None, database=None
)
settings.load_profile("repeatable")


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private run folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ssd-t-") as folder:
        monkeypatch.setenv("SSD_RUN_DIR", folder)
        yield Path(folder)
