"""The matrix products under MLX: the kernel for few rows is exact, and optional."""

import ctypes
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from services.mlx import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS brings its own BLAS")

Floats = npt.NDArray[np.float32]

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112


def uniform(*shape: int) -> Floats:
    """Values without cancellation, so that rounding stays relative."""
    return np.random.default_rng(sum(shape)).uniform(0.5, 1.5, shape).astype(np.float32)


@pytest.fixture
def kernel(tmp_path: Path) -> ctypes.CDLL:
    """The kernel by itself, freshly compiled; whatever is not its own goes nowhere."""
    library = tmp_path / "kernel.so"
    blas._compile(library)
    loaded = ctypes.CDLL(str(library))
    assert loaded.small_gemm_take(None, 1, 16) == 16
    return loaded


def product(kernel: ctypes.CDLL, x: Floats, w: Floats, alpha: float = 1.0) -> Floats:
    """alpha * x @ w.T, with padding between the rows of all three, as strided views have."""
    (m, k), n = x.shape, w.shape[0]
    out = np.full((m, n + 3), np.nan, np.float32)
    padded_x, padded_w = np.pad(x, ((0, 0), (0, 2))), np.pad(w, ((0, 0), (0, 5)))
    real, pointer = ctypes.c_float, ctypes.c_void_p
    kernel.cblas_sgemm(
        *(ROW_MAJOR, PLAIN, TRANSPOSED, m, n, k, real(alpha)),
        *(pointer(padded_x.ctypes.data), k + 2, pointer(padded_w.ctypes.data), k + 5),
        *(real(0.0), pointer(out.ctypes.data), n + 3),
    )
    assert np.isnan(out[:, n:]).all(), "wrote beyond its columns"
    return out[:, :n]


@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize(("columns", "depth"), [(1, 8), (5, 3), (48, 64), (101, 77), (200, 16)])
def test_the_kernel_multiplies(kernel: ctypes.CDLL, rows: int, columns: int, depth: int) -> None:
    """For any number of rows, and columns and depths that fill no vector."""
    x, w = uniform(rows, depth), uniform(columns, depth)
    expected = 0.5 * (x.astype(np.float64) @ w.T.astype(np.float64))
    np.testing.assert_allclose(product(kernel, x, w, alpha=0.5), expected, rtol=1e-5)


@pytest.mark.parametrize("depth", [64, 77])
def test_a_row_gives_the_same_bits_in_any_company(kernel: ctypes.CDLL, depth: int) -> None:
    """So a verification sees exactly what plain decoding would."""
    x, w = uniform(16, depth), uniform(101, depth)
    alone = np.concatenate([product(kernel, x[i : i + 1], w) for i in range(16)])
    for rows in range(2, 17):
        np.testing.assert_array_equal(product(kernel, x[:rows], w), alone[:rows])


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 17, 40])
def test_mlx_multiplies_through_it(rows: int) -> None:
    """With the kernel in place (conftest), every product of MLX is still one."""
    x, w = uniform(rows, 77), uniform(101, 77)
    for found, expected in (
        (mx.array(x) @ mx.array(w).T, x @ w.T),
        (mx.array(x) @ mx.array(w.T.copy()), x @ w.T),
        (mx.addmm(mx.ones((rows, 101)), mx.array(x), mx.array(w).T), 1 + x @ w.T),
    ):
        np.testing.assert_allclose(np.array(found), expected, rtol=1e-5)


@pytest.mark.skipif(
    mx.cuda.is_available() and blas.cpu_kernels() is None,
    reason="a CUDA installation without the extra 'cpu' has no kernels for the CPU",
)
def test_it_is_in_use() -> None:
    """MLX's own symbol for a product is the kernel's."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert "libssd_cpu_kernels" in maps
    here, kernel = ctypes.CDLL(None), blas._load_kernels()
    assert kernel is not None
    ours, used = (ctypes.cast(x.cblas_sgemm, ctypes.c_void_p).value for x in (kernel, here))
    assert ours == used


@pytest.mark.parametrize(
    "cause", [FileNotFoundError("no cc"), subprocess.CalledProcessError(1, "cc"), OSError("full")]
)
def test_without_a_compiler_there_is_a_warning_and_no_kernel(
    cause: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs speed only."""

    def fail(library: Path) -> None:
        raise cause

    monkeypatch.setattr(blas, "_compile", fail)
    monkeypatch.setattr(blas.hashlib, "sha256", lambda data: _Unseen())
    assert blas._load_kernels() is None
    assert "no CPU kernels" in caplog.text


class _Unseen:
    """The digest of a source that was never compiled."""

    def hexdigest(self) -> str:
        return "unseen" * 4


def test_a_process_loads_them_once() -> None:
    """A second caller, with other threads in mind, changes nothing (conftest asked for one)."""
    blas.load_blas(threads=2)
    assert blas._Loaded.cores == ()
