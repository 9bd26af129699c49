"""The libraries under MLX on Linux: optional, and loaded once."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from services.kernels.cpu import library
from tests.support.reference import for_the_cpu

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS brings its own BLAS")


@for_the_cpu
def test_they_are_in_use() -> None:
    """MKL, where it is installed, and our kernels."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert "libssd_cpu_kernels" in maps
    installed = any(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    assert ("libmkl_rt" in maps) == installed


@pytest.mark.parametrize(
    "cause", [FileNotFoundError("no cc"), subprocess.CalledProcessError(1, "cc"), OSError("full")]
)
def test_without_a_compiler_there_is_a_warning_and_no_kernel(
    cause: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs speed only."""

    def fail(library: Path) -> None:
        raise cause

    monkeypatch.setattr(library, "compile_library", fail)
    monkeypatch.setattr(library.hashlib, "sha256", lambda data: _Unseen())
    assert library._load_kernels(0) is None
    assert "no CPU kernels" in caplog.text


class _Unseen:
    """The digest of a source that was never compiled."""

    def hexdigest(self) -> str:
        return "unseen" * 4


def test_a_process_loads_them_once() -> None:
    """A second caller, with other threads in mind, changes nothing (conftest asked for one)."""
    library.load_blas(threads=2)
    assert library._Loaded.cores == ()


@for_the_cpu
def test_a_row_of_mlxs_products_has_the_same_bits_in_any_company() -> None:
    """Up to sixteen rows, as of a verification."""
    x, weight = mx.random.normal((16, 77)), mx.random.normal((1000, 77))
    alone = np.concatenate([np.array(x[row : row + 1] @ weight.T) for row in range(16)])
    for rows in (2, 4, 9, 16):
        np.testing.assert_array_equal(np.array(x[:rows] @ weight.T), alone[:rows])
    np.testing.assert_allclose(alone, np.array(x) @ np.array(weight).T, rtol=1e-4, atol=1e-4)
