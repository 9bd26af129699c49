"""Settings that all tests share."""

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from services.mlx.blas import load_blas

# The same BLAS as in the processes, before any test imports MLX.
load_blas(threads=1)

# Nor is each module compiled again in each process that a test starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

EXAMPLES = {"few": 15, "many": 40}
"""Examples of a property, by profile: `make test` tries few, `make test-all` many."""

# The same examples in every run: a failure is a fact about the code, not about the day.
for _name, _count in EXAMPLES.items():
    settings.register_profile(
        _name,
        derandomize=True,
        max_examples=_count,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        database=None,
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))

KERNEL_FOLDERS = [
    Path(__file__).parent / "services" / "mlx" / name for name in ("cuda", "metal", "few_rows")
]
"""Every test in them compiles kernels or compares them with MLX."""

REPRESENTATIVES = {"llama", "gemma3", "mamba", "hybrid", "dynamic"}
"""Model families of `make test`: slots, windows, recurrent, hybrid, a RoPE base that changes."""


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private run folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ssd-t-") as folder:
        monkeypatch.setenv("SSD_RUN_DIR", folder)
        yield Path(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark kernels and further model families; order the files for several test processes."""
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in KERNEL_FOLDERS):
            item.add_marker("kernel")
    _mark_further_families(items)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    # Files with many processes first: at the end, what is left is shared out evenly.
    costly = Counter(item.path for item in items if item.get_closest_marker("processes"))
    items.sort(key=lambda item: -costly[item.path])


def _mark_further_families(items: list[pytest.Item]) -> None:
    """Of a test's families only the representatives stay unmarked, or else the first one."""
    tests: dict[tuple[Path, str], list[tuple[pytest.Item, str]]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            family = item.callspec.params.get("family")
            if isinstance(family, str):
                tests[item.path, item.originalname].append((item, family))
    for cases in tests.values():
        families = [family for _, family in cases]
        usual = REPRESENTATIVES.intersection(families) or {families[0]}
        for item, family in cases:
            if family not in usual:
                item.add_marker("wide")
