"""Settings that all tests share."""

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest

from services.kernels.cpu.library import load_blas
from tests.properties import load_profile

# The same BLAS as in the processes, before any test imports MLX.
load_blas(threads=1)

# Nor is each module compiled again in each process that a test starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

load_profile()

KERNELS = tuple(
    Path(__file__).parent / "services" / name
    for name in (
        "engine/test_forward_trial.py",
        "engine/test_in_place.py",
        "engine/test_traced_forward.py",
        "engine/test_traced_table.py",
        "kernels/cuda",
        "kernels/metal",
        "kernels/cpu/test_library.py",
    )
)
"""Every test in them compiles kernels or traces, or compares them with MLX."""

MARKED = ("processes", "model", "kernel", "wide", "real")
"""What `make test` leaves to `make test-all`."""

REPRESENTATIVES = {"llama", "gemma3", "mamba", "hybrid", "dynamic"}
"""Model families of `make test`: slots, windows, recurrent, hybrid, a RoPE base that changes."""

COMPUTING = tuple(
    Path(__file__).parent / name
    for name in (
        "orchestrator/simulation",
        "pipeline",
        "services/engine",
        "services/coreml",
        "services/distill",
        "services/drafter",
        "services/kernels/cuda",
        "services/kernels/metal",
        "services/kv",
        "services/mlx",
        "services/ranks",
        "services/sampling",
        "services/verifier",
    )
)
"""Folders whose tests run models or simulate: `make test` takes few cases of each."""

EXHAUSTIVE = (Path(__file__).parent / "orchestrator/simulation/test_planner_simulated.py",)
"""The planner against every fixed choice on many devices takes a minute."""

CASES = 3
"""Cases of a test in these folders that `make test` takes; where families differ, one of each."""


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private run folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ssd-t-") as folder:
        monkeypatch.setenv("SSD_RUN_DIR", folder)
        yield Path(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark kernels and wide tables; order the files for several test processes."""
    for item in items:
        if _is_in(item.path, KERNELS):
            item.add_marker("kernel")
        if _is_in(item.path, EXHAUSTIVE):
            item.add_marker("wide")
    _mark_wide_tables(items)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    # The longest files first: at the end, what is left is shared out evenly.
    costly = Counter(item.path for item in items if item.get_closest_marker("processes"))
    items.sort(key=lambda item: (item.path.name != "test_smoke.py", -costly[item.path]))


def _mark_wide_tables(items: list[pytest.Item]) -> None:
    """Mark as `wide` what `make test` leaves out of each test's cases.

    The cases that stay are picked by a hash of their names, so that they come from all over a
    table and stay the same when others are added.
    """
    tests: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if any(item.get_closest_marker(name) for name in MARKED):
            continue
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.path, item.originalname].append(item)
    for cases in tests.values():
        cases.sort(key=lambda item: crc32(item.name.encode()))
        families = {item: item.callspec.params.get("family") for item in cases}
        usual = REPRESENTATIVES.intersection(map(str, families.values()))
        computing = _is_in(cases[0].path, COMPUTING)
        taken = Counter[object]()
        for item, family in families.items():
            allowed = 1 if usual else CASES
            kind = family if usual else None
            taken[kind] += 1
            if (usual and family not in usual) or (computing and taken[kind] > allowed):
                item.add_marker("wide")


@cache
def _is_in(path: Path, places: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(place) for place in places)
