"""Compiled kernels where MLX looks for them: their names, and what becomes of a file."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.kernels.cuda import (
    attention,
    disk_cache,
    doorbell,
    host_rows,
    kernel,
    kv_rows,
    product,
    rotate,
)
from services.kernels.cuda.disk_cache import (
    KernelText,
    hash_text,
    keep,
    name_function,
    write_function,
)
from services.kernels.cuda.sampling import best, choose, guess
from services.kernels.cuda.sampling.rules import WORDS

BODY = (
    "uint elem = blockIdx.x * blockDim.x + threadIdx.x; out[elem] = x[elem] + T(1) * x_strides[0];"
)
PLUS = KernelText("plus", "", BODY, ("x",), ("out",))
TEMPLATE = [("T", mx.float32), ("N", 4)]
MODULE = "custom_kernel_plus_float_4_48f7718dbc0d9ce0"
"""As MLX 0.32.4 called this kernel on an H100."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where MLX keeps its kernels; the compiler is a fake one."""
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(disk_cache, "_compile", lambda _: b"binary")
    return tmp_path / "kernels"


def _keep(text: KernelText = PLUS) -> None:
    keep(text, [mx.zeros(8)], [mx.float32], TEMPLATE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0x553E93901E462A6E),
        ("abc", 0x32D82BF8ED3DBA39),
        ("abcdefgh", 0x783DB3E38DB898BB),
        ("abcdefghi jklmnop qrs", 0x0A2D9D88B0D9184E),
    ],
)
def test_a_text_is_hashed_as_by_the_standard_library(text: str, expected: int) -> None:
    """The expected ones are a C++ program's, compiled by GCC 12."""
    assert hash_text(text) == expected


def test_a_kernel_is_where_mlx_looks_for_it(folder: Path) -> None:
    _keep()
    assert {path.name for path in folder.iterdir()} == {f"{MODULE}.ptx", f"{MODULE}.txt"}
    assert (folder / f"{MODULE}.ptx").read_bytes() == b"binary"
    names = (folder / f"{MODULE}.txt").read_text()
    assert names == "mlx::core::cu::custom_kernel_plus_float_4\tcustom_kernel_plus_float_4\n"


def test_a_kernel_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _keep()
    monkeypatch.setattr(disk_cache, "_compile", lambda _: pytest.fail("compiled again"))
    _keep()
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("suffix", [".ptx", ".txt"])
@pytest.mark.parametrize("empty", [True, False])
def test_what_is_lost_in_part_is_compiled_again(folder: Path, suffix: str, *, empty: bool) -> None:
    _keep()
    lost = folder / f"{MODULE}{suffix}"
    lost.write_bytes(b"")
    if not empty:
        lost.unlink()
    _keep()
    assert lost.read_bytes()


def test_constants_and_types_are_part_of_the_name() -> None:
    template = [("T", mx.bfloat16), ("N", -1), ("GATED", True)]
    name = name_function(PLUS, template)
    assert name == "custom_kernel_plus_bfloat16_t_-1_t"
    text = write_function(PLUS, name, [mx.zeros(8, mx.bfloat16)], [mx.bfloat16], template)
    assert "    const __nv_bfloat16* x,\n    const __grid_constant__ Strides x_strides,\n" in text
    assert (
        "  using T = __nv_bfloat16;\n  constexpr int N = -1;\n  constexpr bool GATED = true;"
        in text
    )


def test_a_number_by_itself_has_no_strides() -> None:
    text = write_function(PLUS, "plus", [mx.array(1.0)], [mx.float32], [])
    assert text.startswith(
        disk_cache._BEGIN + "plus(\n    const float* x,\n    float* out) {\nuint"
    )


@pytest.mark.parametrize(
    "error", [OSError("no compiler"), RuntimeError("does not compile"), KeyError("bool")]
)
def test_what_is_not_compiled_is_left_to_mlx(
    error: Exception,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said once."""

    def fail(_: str) -> bytes:
        raise error

    monkeypatch.setattr(disk_cache, "_compile", fail)
    disk_cache._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        _keep()
        _keep(PLUS._replace(name="minus"))
    assert [record.message for record in caplog.records] == [
        f"kernels are compiled at every start: {error}"
    ]
    assert not folder.exists()


def test_no_half_a_kernel_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names come first: MLX reads them as soon as there is a binary."""

    def stop(path: Path, data: bytes, **_: Any) -> None:
        raise OSError(f"{path.suffix} of {len(data)} bytes: no space left")

    monkeypatch.setattr(disk_cache, "write_atomically", stop)
    disk_cache._warn.cache_clear()
    _keep()
    assert not list(folder.iterdir())


@pytest.fixture
def _no_kernels() -> Iterator[None]:
    """Kernels are built anew, and those of the test serve nobody else."""
    kernel.build.cache_clear()
    yield
    kernel.build.cache_clear()


@pytest.mark.usefixtures("_no_kernels")
def test_all_kernels_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By NVIDIA's compiler, which needs no device; what MLX's headers give them is there."""
    pytest.importorskip("cuda.core", reason="needs the extra cuda")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    major, minor = "compute_capability_major", "compute_capability_minor"
    monkeypatch.setattr(mx, "device_info", lambda: {major: 9, minor: 0})
    shapes: Any = SimpleNamespace(cuda_kernel=lambda **_: _zeros)
    monkeypatch.setattr(mx, "fast", shapes)
    disk_cache._warn.cache_clear()
    for dtype in (mx.float16, mx.bfloat16):
        launch_all(dtype)
    assert caplog.records == []
    kinds = {file.name.split("_")[2] for file in tmp_path.glob("*.ptx")}
    assert kinds == {
        "attention",
        "best",
        "choose",
        "doorbell",
        "guess",
        "host",
        "kv",
        "product",
        "rotate",
    }


def _zeros(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
    return [mx.zeros(*pair) for pair in zip(output_shapes, output_dtypes, strict=True)]


def launch_all(dtype: mx.Dtype) -> None:
    """Each kernel, in each of its forms."""
    for rows in (1, 9, 17):
        x, weight = mx.zeros((1, rows, 64), dtype), mx.zeros((64, 64), dtype)
        product.multiply(x, weight)
        product.multiply(x, weight, more=x)
        product.multiply(x, weight, more=x[0, 0], norm=product.Norm(x[0, 0], 1e-6))
        product.multiply(x, weight, gated=True)
    for size in attention._WARPS:
        queries = mx.zeros((1, 4, 3, size), dtype)
        for slots in (2 * attention._PART, 256):
            keys, mask = mx.zeros((1, 2, slots, size), dtype), mx.ones((3, slots), mx.bool_)
            attention._attend_alone(queries, keys, keys, 1, mask)
            seats = {"q": queries, "k": keys[0], "v": keys[0], "mask": mask}
            attention._attend_seats({**seats, "first": mx.zeros(3, mx.int32)}, 0.5)
    for norm in (None, rotate.HeadNorm(mx.ones((2, 64), dtype), 1e-5)):
        layer = rotate.Heads(4, 2, 64, 64, mx.zeros(32), norm)
        x, into = mx.zeros((1, 3, 8 * 64), dtype), mx.zeros((1, 2, 256, 64), dtype)
        buffers = kv_rows.KVBuffers(into, into, mx.arange(3))
        rotate.rotate(x, mx.arange(3), layer)
        rotate.rotate_into(x, mx.arange(3), layer, buffers)
    kv_rows.write(buffers, into[:, :, :3], into[:, :, :3])
    kv_rows.move(into, into, mx.arange(3), 2)
    for width in best.WIDTHS:
        best.launch(mx.zeros((2, 100), dtype), width)
    rows, rules = mx.zeros((2, 100), dtype), mx.zeros((2, WORDS), mx.uint32)
    choose.launch(rows, rules)
    for kind in (guess.GREEDY, guess.DRAWN, guess.FILTERED):
        guess.launch(rows, mx.arange(100), rules, kind)
    doorbell.Doorbell(np.zeros((4, 128), np.int32)).await_tokens(8, 256, 9)
    doorbell.split_in_pairs(mx.arange(5))
    host_rows._launch(mx.zeros((3, 64), dtype), np.zeros(3 * 64 * 2, np.uint8))


_USE = """
import sys
import mlx.core as mx
from services.kernels.cuda.product import multiply
rows, weight = mx.ones((1, 2, 64), mx.float16), mx.ones((64, 64), mx.float16)
print(multiply(rows, weight).sum().item())
"""


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
def test_mlx_takes_what_was_compiled_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process loads the first one's file: spoiled, it does not run."""
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _USE]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    first = run()
    assert first.stdout.split() == ["8192.0"], first.stderr
    (binary,) = tmp_path.glob("custom_kernel_product*.ptx")
    assert run().stdout.split() == ["8192.0"]
    binary.write_bytes(b"no kernel")
    assert run().returncode != 0
