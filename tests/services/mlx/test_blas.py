"""The matrix products under MLX: the kernel for few rows is exact, and optional."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from services.kernels.cpu.build import compile_library
from services.mlx import blas
from services.mlx.blas import WeightCopy, WeightKind
from tests.support.cpu_kernels import (
    PLAIN,
    ROW_MAJOR,
    TRANSPOSED,
    Floats,
    add_copy,
    contiguous_product,
)
from tests.support.reference import for_the_cpu

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS brings its own BLAS")


def uniform(*shape: int) -> Floats:
    """Values without cancellation, so that rounding stays relative."""
    return np.random.default_rng(sum(shape)).uniform(0.5, 1.5, shape).astype(np.float32)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel, freshly compiled."""
    library = tmp_path_factory.mktemp("kernel") / "kernel.so"
    compile_library(library, blas._SOURCES)
    return library


@pytest.fixture
def kernel(compiled: Path, tmp_path: Path) -> ctypes.CDLL:
    """The kernel by itself, with a state of its own; whatever is not its own goes nowhere."""
    library = shutil.copy(compiled, tmp_path / "kernel.so")
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


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 40, 64])
@pytest.mark.parametrize(("columns", "depth"), [(5, 3), (101, 77), (200, 160)])
def test_an_int8_copy_is_read_in_the_place_of_its_weight(
    kernel: ctypes.CDLL, rows: int, columns: int, depth: int
) -> None:
    """With one scale a row of it, for any number of rows; other weights are read as they are."""
    x, w, other = uniform(rows, depth), uniform(columns, depth), uniform(columns, depth) + 1
    copy = np.random.default_rng(depth).integers(-127, 128, (columns, depth), np.int8)
    scales = uniform(columns)
    assert add_copy(kernel, w, rounded(copy, scales))
    expected = 0.5 * x.astype(np.float64) @ (scales[:, None] * copy).T
    found = contiguous_product(kernel, x, w)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3 * depth**0.5)
    alone = [contiguous_product(kernel, x[i : i + 1], w)[0] for i in range(rows)]
    np.testing.assert_array_equal(found, alone)
    if rows <= 16:
        expected = 0.5 * x.astype(np.float64) @ other.T
        np.testing.assert_allclose(contiguous_product(kernel, x, other), expected, rtol=1e-5)


def test_a_part_of_a_weight_has_no_copy(kernel: ctypes.CDLL) -> None:
    """The first rows begin where the whole weight does."""
    x, w = uniform(2, 32), uniform(20, 32)
    assert add_copy(kernel, w, rounded(np.zeros((20, 32), np.int8), uniform(20)))
    assert not contiguous_product(kernel, x, w).any()
    expected = 0.5 * x.astype(np.float64) @ w[:10].T
    np.testing.assert_allclose(contiguous_product(kernel, x, w[:10]), expected, rtol=1e-5)


def test_many_weights_have_copies(kernel: ctypes.CDLL) -> None:
    """Each its own, and there is an end to them."""
    x, all_rows = uniform(1, 8), np.repeat(np.arange(3000, dtype=np.float32), 8).reshape(-1, 8)
    copy, scales = np.ones((1, 8), np.int8), np.arange(3000, dtype=np.float32) + 1
    weights = [all_rows[i : i + 1] for i in range(3000)]
    added = [add_copy(kernel, w, rounded(copy, scales[i:])) for i, w in enumerate(weights)]
    assert sum(added) == added.index(False) == 2048
    for i in (0, 1, 1000, 2047):
        expected = 0.5 * x.astype(np.float64).sum(axis=1, keepdims=True) * (i + 1)
        np.testing.assert_allclose(contiguous_product(kernel, x, weights[i]), expected, rtol=1e-5)


def rounded(copy: npt.NDArray[np.int8], scales: Floats) -> WeightCopy:
    """A copy in bytes."""
    return WeightCopy(WeightKind.ROUNDED_INT8, copy, scales)


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


@for_the_cpu
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

    def fail(library: Path, others: object) -> None:
        raise cause

    monkeypatch.setattr(blas, "compile_library", fail)
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


_WITHOUT_MKL = """
import sys
from services.mlx import blas
blas._find_mkl = lambda: None
blas.load_blas(threads=1)
import mlx.core as mx
import numpy as np
mx.set_default_device(mx.cpu)
random = np.random.default_rng(0)
for rows in (1, 4, 16, 40):
    x, w = (random.uniform(0.5, 1.5, (count, 77)).astype(np.float32) for count in (rows, 101))
    np.testing.assert_allclose(np.array(mx.array(x) @ mx.array(w).T), x @ w.T, rtol=1e-5)
assert blas.cpu_kernels() is not None
assert "libmkl" not in open("/proc/self/maps").read()
"""


def test_the_kernels_work_without_mkl() -> None:
    """As in an installation for CUDA, whose drafter may compute on the CPU; others' products
    go to MLX's own library."""
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_MKL], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "MKL is not installed" in run.stderr or mx.cuda.is_available()


def test_without_any_library_mlx_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blas, "_Loaded", type("Nothing", (), {"kernels": None}))
    monkeypatch.setattr(blas, "_find_mkl", lambda: None)
    monkeypatch.setattr(blas, "_find_reference_blas", lambda: None)
    blas.load_blas(threads=1)
    assert blas.cpu_kernels() is None
    assert "MKL is not installed" in caplog.text
