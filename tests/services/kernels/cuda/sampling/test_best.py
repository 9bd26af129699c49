"""The best few of a row of logits on CUDA: the kernel's source run on the host."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.kernels.cuda.sampling import best
from services.kernels.cuda.sampling.best import WIDTHS, find_best, sort_best
from services.kernels.register import KERNELS
from services.mlx import selftest
from services.sampling import device
from services.sampling.candidates import best_of
from tests.services.kernels.cuda.host import compile_kernel, run_kernel
from tests.services.runtime.steps import at_once


@pytest.fixture(scope="module", params=[1, 4, 8, 16])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    program = tmp_path_factory.mktemp("kernel") / "best"
    return compile_kernel(
        "sampling/best_host.cpp", program, BEST_WIDTH=request.param
    ), request.param


def check(kernel: tuple[Path, int], row: Any) -> None:
    program, width = kernel
    found = run_kernel(program, len(row), 1, row)
    order = np.argsort(-row, kind="stable")[:width]
    np.testing.assert_array_equal(found[:width], order)
    np.testing.assert_array_equal(found[width:-1], row[order])
    assert found[-1] == pytest.approx(float(np.logaddexp.reduce(row.astype(np.float64))), abs=1e-4)


@pytest.mark.parametrize("head", [16, 65, 1000])
def test_finds_the_best_in_order(kernel: tuple[Path, int], head: int) -> None:
    check(kernel, np.random.default_rng(head).normal(size=head).astype(np.float32))


def test_all_the_best_may_be_one_thread_s(kernel: tuple[Path, int]) -> None:
    """Which keeps few of them at a time: 64 threads take the columns in turn."""
    row = np.random.default_rng(3).normal(size=1600).astype(np.float32)
    row[7::64] += 10.0
    check(kernel, row)


def test_of_equal_ones_the_first_counts(kernel: tuple[Path, int]) -> None:
    row = np.round(np.random.default_rng(4).normal(size=500)).astype(np.float32)
    check(kernel, row)


def test_a_logit_that_is_no_number_is_noticed(kernel: tuple[Path, int]) -> None:
    row = np.ones(100, np.float32)
    row[50] = np.nan
    assert np.isnan(run_kernel(kernel[0], len(row), 1, row)[-1])


def test_its_numbers_may_lie_apart(kernel: tuple[Path, int]) -> None:
    row = np.random.default_rng(6).normal(size=(90, 3)).astype(np.float32)
    together = run_kernel(kernel[0], 90, 1, np.ascontiguousarray(row[:, 0]))
    np.testing.assert_array_equal(run_kernel(kernel[0], 90, 3, row), together)


def test_elsewhere_it_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kernels", lambda: KERNELS["metal"])
    monkeypatch.setattr(best, "launch", None)
    rows = np.random.default_rng(5).normal(size=(2, 50)).astype(np.float32)
    found, expected = device.best_of(mx.array(rows), 3, None), best_of(rows, 3, None)
    np.testing.assert_array_equal(found.ids, expected.ids)


@pytest.mark.parametrize(
    ("change", "times", "used"),
    [(0.0, [2.0, 1.0], True), (0.0, [1.0, 1.0], False), (0.1, [2.0, 1.0], False)],
)
def test_it_is_used_where_it_is_right_and_faster(
    monkeypatch: pytest.MonkeyPatch, change: float, times: list[float], *, used: bool
) -> None:
    launched = []

    def launch(rows: mx.array, width: int) -> mx.array:
        launched.append(rows.shape)
        return sort_best(rows, width) + change

    monkeypatch.setattr(best, "launch", launch)
    monkeypatch.setattr(selftest, "time_in_turn", lambda _: at_once(times))
    monkeypatch.setattr(device, "kernels", lambda: KERNELS["cuda"])
    best._works.cache_clear()
    rows = np.random.default_rng(7).normal(size=(2, 400)).astype(np.float32)
    found, expected = device.best_of(mx.array(rows), 3, None), best_of(rows, 3, None)
    best._works.cache_clear()
    assert ((2, 400) in launched) is used
    np.testing.assert_array_equal(found.ids, expected.ids)
    for ours, right in ((found.logits, expected.logits), (found.totals, expected.totals)):
        np.testing.assert_allclose(ours, right, atol=1e-5)


@pytest.mark.parametrize(("head", "width"), [(400, WIDTHS[-1] + 1), (WIDTHS[0] - 1, 2), (400, 1)])
def test_some_rows_are_not_for_it(monkeypatch: pytest.MonkeyPatch, head: int, width: int) -> None:
    """More columns than it finds, fewer than it would, and the best one alone."""
    monkeypatch.setattr(best, "_works", lambda *_: True)
    assert find_best(mx.zeros((1, head)), width) is None


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_kernel_finds_what_a_sort_does(width: int, dtype: mx.Dtype) -> None:
    rows = mx.random.normal((5, 49152), key=mx.random.key(width)).astype(dtype)[:, :49000]
    found: Any = np.array(best.launch(rows, width))
    wide: Any = np.array(rows.astype(mx.float32))
    order = np.argsort(-wide, axis=-1, kind="stable")[:, :width]
    np.testing.assert_array_equal(found[:, :width], order)
    np.testing.assert_array_equal(found[:, width:-1], np.take_along_axis(wide, order, axis=-1))
