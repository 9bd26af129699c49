"""The product of a few rows on CUDA: its source run on the host, and where it is used.

A CUDA device is not needed but for the last test: the kernel's file is compiled as C++.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from protocol.jobs.kernel_report import KernelReportSettings
from services.kernels.cuda import choice, product
from services.kernels.cuda.choice import FewRows, in_trace, use_products
from services.kernels.register import KERNELS
from services.mlx import selftest
from services.mlx.fused_linear import fuse_linears
from services.mlx.loader import load
from services.runtime.preparation import run_all
from services.tools import kernel_report
from tests.services.kernels.cuda.host import compile_kernel, run_kernel
from tests.services.runtime.steps import at_once
from tests.support.reference import tiny_folder

SHAPES = [(1, 1, 8, 0), (2, 2, 4, 0), (1, 2, 4, 1), (4, 2, 4, 1)]
"""Tiles of rows, groups of outputs and warps of a block, and whether it is gated."""


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def kernel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bool]:
    tiles, groups, warps, gated = request.param
    program = tmp_path_factory.mktemp("kernel") / "product"
    sizes = {"BLOCK_TILES": tiles, "BLOCK_GROUPS": groups, "BLOCK_WARPS": warps}
    return compile_kernel("product_host.cpp", program, **sizes, BLOCK_GATED=gated), bool(gated)


Kernel = tuple[Path, bool]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("adds", ["nothing", "a row", "rows"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 128, 8), (3, 1328, 21), (9, 40, 37)])
def test_is_the_product(
    kernel: Kernel, rows: int, inputs: int, outputs: int, adds: str, *, normed: bool
) -> None:
    """Of any number of rows, inputs and outputs, whole groups of them or not."""
    program, gated = kernel
    random = np.random.default_rng(rows)
    added = {"nothing": 0, "a row": 1, "rows": rows}[adds]
    x, w, more, gains = (
        random.normal(size=size)
        for size in [
            (rows, inputs),
            (2 * outputs if gated else outputs, inputs),
            (added, outputs),
            (inputs if normed else 0,),
        ]
    )
    numbers = [rows, inputs, outputs, added, int(normed), x, w / inputs**0.5, more, gains]
    found = run_kernel(program, *numbers).reshape(rows, outputs)
    if normed:
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 0.5) * gains
    expected = x @ w.T / inputs**0.5
    if gated:
        gate, up = np.split(expected, 2, axis=1)
        expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(found, expected + (more if added else 0), atol=1e-4)


def test_a_row_has_the_same_bits_in_any_company(
    kernel: Kernel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And however its block is divided."""
    program, gated = kernel
    random = np.random.default_rng(1)
    x, w, gains = (random.normal(size=(count, 2080)) for count in (9, 12 if gated else 6, 1))
    together = run_kernel(program, 9, 2080, 6, 0, 1, x, w, gains).reshape(9, 6)
    for row in (0, 4, 8):
        alone = run_kernel(program, 1, 2080, 6, 0, 1, x[row], w, gains)
        np.testing.assert_array_equal(together[row], alone)
    if not gated:
        sizes = {"BLOCK_TILES": 1, "BLOCK_GROUPS": 1, "BLOCK_WARPS": 4, "BLOCK_GATED": 0}
        other = compile_kernel(
            "product_host.cpp", tmp_path_factory.mktemp("other") / "product", **sizes
        )
        found = run_kernel(other, 9, 2080, 6, 0, 1, x, w, gains)
        np.testing.assert_array_equal(found, together.ravel())


class Products:
    """Stands in for the kernel: MLX's product, counted; or a wrong or broken one."""

    def __init__(self, factor: float = 1.0, fails_from: int = 1 << 20) -> None:
        self.factor, self.fails_from = factor, fails_from
        self.rows: list[int] = []

    def __call__(
        self,
        x: mx.array,
        weight: mx.array,
        *,
        norm: None = None,
        more: mx.array | None = None,
    ) -> mx.array:
        del norm
        rows = x.size // weight.shape[1]
        if rows >= self.fails_from:
            raise RuntimeError("too many resources requested for launch")
        self.rows.append(rows)
        found: mx.array = self.factor * (x @ weight.T)
        return found if more is None else found + more


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Products]:
    """Lets the choice take place, with times as given: by rows, the kernel's share of MLX's."""

    def pretend(shares: dict[int, float], **how: Any) -> Products:
        products = Products(**how)
        ms = 1e-3 * choice._AHEAD  # so many of them
        times = iter([(ms, ms * shares.get(rows, 0.5)) for rows in choice._ROWS])
        monkeypatch.setattr(choice, "compute_unit", lambda: "cuda")
        monkeypatch.setattr(selftest, "time_in_turn", lambda _: at_once(next(times)))
        monkeypatch.setattr(product, "multiply", products)
        monkeypatch.setattr(product, "TYPES", (mx.float32,))
        return products

    return pretend


OnCuda = Callable[..., Products]


def model_of(family: str = "llama") -> Any:
    return load(tiny_folder(family)).module


@pytest.mark.parametrize(
    ("shares", "least", "most"),
    [
        ({}, 1, 64),
        ({16: 1.1, 32: 1.1}, 1, 8),
        ({16: 1.1}, 1, 64),  # timed in a bad moment, or worth it for the others
        ({16: 1.1, 64: 1.1}, 1, 32),
        ({16: 2.0, 32: 0.9}, 1, 8),
        ({1: 1.1, 2: 0.99, 4: 0.98}, 0, 0),
        ({1: 1.1, 2: 0.99}, 4, 64),
        ({1: 1.02}, 1, 64),
        ({1: 1.02, 2: 0.99}, 1, 64),
        ({1: 1.02, 2: 0.99, 4: 0.98}, 0, 0),
        ({1: 1.02, 2: 0.99, 4: 0.965, 8: 1.1, 16: 1.1}, 1, 4),
        ({1: 1.03, 2: 0.99, 4: 0.99}, 0, 0),
        ({1: 0.99, 2: 1.2, 4: 0.96, 8: 1.2, 16: 1.2}, 0, 0),
        ({1: 1.03, 2: 0.965, 4: 1.1, 8: 1.1}, 1, 2),
        ({1: 1.03, 2: 1.02, 4: 0.965, 8: 1.1, 16: 1.1}, 0, 0),
        ({1: 0.9, 2: 0.99, 4: 1.1}, 1, 2),
        ({1: 0.9, 2: 1.1, 4: 1.1}, 1, 1),
        ({1: 1.1, 32: 0.98, 64: 0.2}, 2, 64),
    ],
)
def test_it_serves_as_many_rows_as_it_is_faster_for(
    on_cuda: OnCuda, shares: dict[int, float], least: int, most: int
) -> None:
    """Single rows as well if it is as fast: they have the bits of several then."""
    on_cuda(shares)
    found = run_all(use_products(model_of()))
    assert found is not None
    assert (found.most_rows, found.least_rows) == (most, least)
    assert ("faster" in found.reason) is (most < 64)


def test_more_rows_are_not_tried_behind_two_that_lose(on_cuda: OnCuda) -> None:
    on_cuda({4: 1.1, 16: 0.98, 32: 1.2})
    found = run_all(use_products(model_of()))
    assert found is not None
    assert list(found.own_ms) == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("how", "most", "reason"),
    [
        ({"factor": 1.1}, 0, "of 1 rows its result is 0.1 from the usual one"),
        ({"fails_from": 16}, 8, "of 16 rows it does not run here: too many resources"),
    ],
)
def test_what_is_wrong_or_does_not_run_is_not_used(
    on_cuda: OnCuda, how: dict[str, Any], most: int, reason: str
) -> None:
    on_cuda({}, **how)
    found = run_all(use_products(model_of()))
    assert found is not None
    assert found.most_rows == most
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("family", ["llama", "qwen3", "biased", "moe"])
def test_few_rows_of_a_trace_go_through_it(on_cuda: OnCuda, family: str) -> None:
    """All products of the model, joint ones too; many rows and other passes do not."""
    module = model_of("llama" if family == "biased" else family)
    if family == "biased":
        layer = module.model.layers[0].self_attn.o_proj
        layer.bias = mx.random.normal((layer.weight.shape[0],), key=mx.random.key(1))
    fuse_linears(module)
    products = on_cuda({16: 1.1, 32: 1.1})
    tokens = mx.array([[5, 6, 7]])
    expected = np.array(module(tokens))
    assert run_all(use_products(module)) is not None
    products.rows.clear()
    np.testing.assert_allclose(np.array(module(tokens)), expected, atol=1e-5)
    assert products.rows == []
    with in_trace():
        np.testing.assert_allclose(np.array(module(tokens)), expected, atol=1e-4)
        assert set(products.rows) == {3}
        layers = len(module.model.layers)
        assert len(products.rows) >= (4 if family != "moe" else 2) * layers
        products.rows.clear()
        mx.eval(module(tokens[:, :1]))
        assert len(products.rows) >= (4 if family != "moe" else 2) * layers
        products.rows.clear()
        mx.eval(module(mx.zeros((1, 9), mx.int32)))
        assert products.rows == []


def test_each_model_has_its_own_numbers_of_rows(on_cuda: OnCuda) -> None:
    module, other = model_of(), model_of()
    products = on_cuda({})
    assert run_all(use_products(module)) is not None
    on_cuda(dict.fromkeys(choice._ROWS, 2.0))
    run_all(use_products(other))
    assert other.model.layers[0].self_attn.o_proj.few_rows == FewRows(0, 0)
    with in_trace():
        mx.eval(module(mx.array([[5, 6, 7]])))
    assert products.rows


def test_a_single_row_stays_with_mlx_where_that_is_faster(on_cuda: OnCuda) -> None:
    module = model_of()
    fuse_linears(module)
    products = on_cuda({1: 1.1})
    assert run_all(use_products(module)) is not None
    products.rows.clear()
    with in_trace():
        mx.eval(module(mx.array([[5]])))
    assert products.rows == []


def test_a_tied_head_goes_through_it(on_cuda: OnCuda) -> None:
    embedding = nn.Embedding(288, 64)
    module = nn.Sequential(embedding)
    products = on_cuda({})
    run_all(use_products(module))
    products.rows.clear()
    x = mx.random.normal((1, 3, 64), key=mx.random.key(0))
    with in_trace():
        found = embedding.as_linear(x)
    assert products.rows == [3]
    np.testing.assert_allclose(np.array(found), np.array(x @ embedding.weight.T), atol=1e-5)


def test_products_are_timed_behind_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are under way before one is waited for."""
    launched: list[list[mx.array]] = []
    monkeypatch.setattr(choice, "launch", launched.append)
    given = [mx.ones((1, 2, 8))]
    found = choice._repeat(lambda inputs: [x * 2 for x in inputs], given)
    assert len(launched) == choice._AHEAD
    assert found is launched[-1]
    assert found[0].tolist() == (given[0] * 2).tolist()


def test_doctor_is_told(on_cuda: OnCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many products there are, joint ones as one, and what was measured of them."""
    on_cuda({16: 1.1, 32: 1.1})
    monkeypatch.setattr(kernel_report, "kernels", lambda: KERNELS["cuda"])
    probes = kernel_report.measure(KernelReportSettings(model=str(tiny_folder("llama")))).probes
    [probe] = [one for one in probes if one.kernel == "product"]
    assert (probe.kernel, probe.most_rows, probe.reason) == ("product", 8, "more are faster by MLX")
    assert probe.layers == 4 * 3 + 1  # of three layers, and the head
    assert probe.own_ms[16] == pytest.approx(1.1)


def test_doctor_is_told_of_other_weights(on_cuda: OnCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda({})
    monkeypatch.setattr(product, "TYPES", ())
    monkeypatch.setattr(kernel_report, "kernels", lambda: KERNELS["cuda"])
    report = kernel_report.measure(KernelReportSettings(model=str(tiny_folder("llama"))))
    assert report.probes == []
    assert "not in half precision" in report.note


def test_elsewhere_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "compute_unit", lambda: "metal")
    module = model_of()
    kinds = [type(one) for one in module.modules()]
    assert run_all(use_products(module)) is None
    assert [type(one) for one in module.modules()] == kinds


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 17, 40])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (5001, 96), (9000, 1536)])
def test_the_kernel_multiplies_as_mlx_does(
    rows: int, dtype: mx.Dtype, shape: tuple[int, int]
) -> None:
    """And a row has the same bits in any company."""
    x, w, more = (
        mx.random.normal(size, dtype, key=mx.random.key(size[0]))
        for size in [(1, rows, shape[1]), (2 * shape[0], shape[1]), (1, rows, shape[0])]
    )
    half, norm = w[: shape[0]], product.Norm(w[-1], 1e-5)
    normed = mx.fast.rms_norm(x, *norm)
    by_us = [
        product.multiply(x, half),
        product.multiply(x, half, more=more),
        product.multiply(x, w, gated=True),
        product.multiply(x, half, norm=norm, more=more[0, 0]),
        product.multiply(x, w, norm=norm, gated=True),
    ]
    gate, up = mx.split((x @ w.T).astype(mx.float32), 2, axis=-1)
    by_mlx = [gate, gate + more.astype(mx.float32), nn.silu(gate) * up]
    gate, up = mx.split((normed @ w.T).astype(mx.float32), 2, axis=-1)
    by_mlx += [gate + more[0, 0].astype(mx.float32), nn.silu(gate) * up]
    for found, expected in zip(by_us, by_mlx, strict=True):
        distance: Any = mx.linalg.norm(found.astype(mx.float32) - expected)
        assert distance.item() < 0.01 * float(mx.linalg.norm(expected))
    for row in {0, rows // 2, rows - 1}:
        one = x[:, row : row + 1]
        assert mx.array_equal(product.multiply(one, half)[0, 0], by_us[0][0, row]).item()
        alone = product.multiply(one, w, norm=norm, gated=True)
        assert mx.array_equal(alone[0, 0], by_us[4][0, row]).item()
