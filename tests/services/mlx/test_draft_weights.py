"""A drafter's weights as bytes: close to its floats, and only where they are asked for."""

import ctypes
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from services.mlx import draft_weights
from services.mlx.draft_weights import int8_copy, quantise_linears, round_to_int8, use_weights
from services.mlx.lm_head import keep_rows
from tests.support.cpu_kernels import add_copy, contiguous_product, load_own, rounded_rows
from tests.support.reference import for_the_cpu


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(600, 256)
        self.layer = nn.Linear(256, 512, bias=False)
        self.small = nn.Linear(16, 16)


class _Tied(nn.Module):
    """What is multiplied of a model with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Inner()


def outputs(model: _Tied, rows: int) -> list[mx.array]:
    """Of the layer, the head and the small layer."""
    x = mx.random.normal((rows, 256), key=mx.random.key(rows))
    inner = model.model
    found = [inner.layer(x), inner.embed_tokens.as_linear(x), inner.small(x[:, :16])]
    mx.eval(found)
    return found


def test_rounding_keeps_what_it_can() -> None:
    """To half a step of each row, and rows of zeros."""
    weight = np.random.default_rng(1).normal(size=(5, 33)).astype(np.float32)
    weight[3] = 0.0
    rows, scales = round_to_int8(weight)
    assert np.abs(rows[[0, 1, 2, 4]]).max(axis=1).tolist() == [127] * 4
    error = np.abs(rows * scales[:, None] - weight).max(axis=1)
    assert (error <= scales * 0.5001).all()
    assert not rows[3].any()


@for_the_cpu
@pytest.mark.parametrize("head", ["whole", "trimmed"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_few_rows_read_bytes(rows: int, head: str) -> None:
    """Large layers and the head, within rounding; a small layer and many rows read floats."""
    model = _Tied()
    mx.eval(model.parameters())
    if head == "trimmed":
        keep_rows(model, np.arange(40, 440))
    before, many = outputs(model, rows), outputs(model, 65)
    use_weights(model, "auto")
    after = outputs(model, rows)
    for old, new in zip(before[:2], after[:2], strict=True):
        error = mx.abs(old - new).max().item() / mx.abs(old).max().item()
        assert 0.0 < error < 0.02
    assert mx.array_equal(before[2], after[2])
    for old, new in zip(many, outputs(model, 65), strict=True):
        assert mx.array_equal(old, new)


def test_floats_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are asked for, and on a GPU unless bytes are."""
    model = _Tied()
    before = outputs(model, 4)
    use_weights(model, "float")
    monkeypatch.setattr(draft_weights, "compute_unit", lambda: "metal")
    use_weights(model, "auto")
    for old, new in zip(before, outputs(model, 4), strict=True):
        assert mx.array_equal(old, new)


def test_on_a_gpu_linear_layers_become_8_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """By MLX's own quantisation, where their size allows it."""
    monkeypatch.setattr(draft_weights, "compute_unit", lambda: "metal")
    model = _Tied()
    before = outputs(model, 4)
    use_weights(model, "int8")
    assert isinstance(model.model.layer, nn.QuantizedLinear)
    assert type(model.model.small) is nn.Linear
    after = outputs(model, 4)
    assert 0.0 < mx.abs(before[0] - after[0]).max().item() < 0.02 * mx.abs(before[0]).max().item()


def test_without_kernels_the_floats_draft(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a word about it only to those who asked for bytes."""
    monkeypatch.setattr(draft_weights, "compute_unit", lambda: "cpu")
    monkeypatch.setattr(draft_weights, "add_copy", lambda *_: False)
    use_weights(_Tied(), "auto")
    assert not caplog.records
    use_weights(_Tied(), "int8")
    assert "need our CPU kernels" in caplog.text


def test_quantising_leaves_other_layers() -> None:
    """Embeddings look tokens up, and are no product."""
    model = _Tied()
    quantise_linears(model)
    assert type(model.model.embed_tokens) is nn.Embedding


@pytest.fixture
def kernel(tmp_path: Path) -> ctypes.CDLL:
    """The kernels with a state of their own."""
    return load_own(tmp_path)


@for_the_cpu
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 63), (70, 64), (9, 100), (128, 576)])
def test_rows_times_bytes(kernel: ctypes.CDLL, n: int, k: int, *, tiled: bool) -> None:
    """Rows as they are times rounded weights, and rounded ones times the same in tiles."""
    if tiled and not kernel.has_int8_rows():
        pytest.skip("this processor does not multiply bytes")
    random = np.random.default_rng(n)
    weight, x = (random.normal(size=(rows, k)).astype(np.float32) for rows in (n, 16))
    x[3] = 0.0
    copy = int8_copy(weight, tiled=tiled)
    assert add_copy(kernel, weight, copy)
    found = contiguous_product(kernel, x, weight)
    rows, scales = round_to_int8(weight)
    beside = rounded_rows(x) if tiled else x.astype(np.float64)
    expected = 0.5 * beside @ (rows * scales[:, None].astype(np.float64)).T
    assert np.abs(found - expected).max() < 1e-4
    for size in range(1, 16):
        parts = [contiguous_product(kernel, x[i : i + size], weight) for i in range(0, 16, size)]
        assert np.array_equal(np.concatenate(parts), found)


@for_the_cpu
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_row_that_is_no_number_gives_none(kernel: ctypes.CDLL, broken: float) -> None:
    """So that whoever reads the logits sees that the drafter is broken; its neighbours are well."""
    random = np.random.default_rng(2)
    weight, x = (random.normal(size=(rows, 64)).astype(np.float32) for rows in (8, 4))
    copy = int8_copy(weight, tiled=bool(kernel.has_int8_rows()))
    add_copy(kernel, weight, copy)
    x[1, 5] = broken
    found = contiguous_product(kernel, x, weight)
    assert not np.isfinite(found[1]).any()
    assert np.isfinite(found[[0, 2, 3]]).all()
