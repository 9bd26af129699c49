"""Products of the same rows in one: the same logits, with fewer products."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from services.kv.cache import KVStore
from services.mlx.fused_linear import FusedSlice, fuse_linears
from services.mlx.loader import load, windows_of
from tests.support.tiny_models import SLOTTED, write_tiny_model

_OUTPUTS = 1024
_JOINTS = {"gemma4": 5, "moe": 4, "glm4": 3}
"""Of three layers, where they are not two in each: keys for values, experts, a joint MLP."""


def _logits(model: Any, rows: int) -> mx.array:
    store = KVStore(windows_of(model), bucketed=False)
    store.chain(4)
    mx.eval(model(mx.array([[1, 2, 3, 4]]), cache=store.caches))
    store.chain(rows)
    found: mx.array = model(mx.arange(5, 5 + rows)[None], cache=store.caches)
    return found


@pytest.mark.parametrize("family", SLOTTED)
def test_the_model_computes_the_same(family: str, tmp_path: Path) -> None:
    model = load(write_tiny_model(tmp_path, family)).module
    before = [_logits(model, rows) for rows in (1, 3)]
    mx.eval(before)
    assert fuse_linears(model) == _JOINTS.get(family, 6)
    for rows, logits in zip((1, 3), before, strict=True):
        np.testing.assert_allclose(_logits(model, rows), logits, atol=1e-5)


def _products(count: int, **kind: Any) -> nn.Module:
    """A module that looks like a gated MLP's beginning."""
    module = nn.Module()
    for name in ("gate_proj", "up_proj")[:count]:
        layer: Any = nn.Linear(64, _OUTPUTS, bias=kind.get("bias", False))
        if bits := kind.get("bits"):
            layer = layer.to_quantized(32, bits, kind.get("mode", "affine"))
        setattr(module, name, layer)
    return module


@pytest.mark.parametrize(
    "kind",
    [{}, {"bias": True}, {"bits": 4}, {"bits": 4, "bias": True}, {"bits": 4, "mode": "mxfp4"}],
)
def test_every_kind_of_linear_layer(kind: dict[str, Any]) -> None:
    module = _products(2, **kind)
    x = mx.random.normal((1, 3, 64), key=mx.random.key(1))
    before = [module.gate_proj(x), module.up_proj(x)]
    mx.eval(before, module.parameters())
    mx.synchronize()  # a GPU holds what a pass has read until it is done
    held = mx.get_active_memory()
    assert fuse_linears(module) == 1
    mx.synchronize()
    # A second copy of the weights would be 64 kB and more; allocations are rounded up.
    assert mx.get_active_memory() <= held + (1 << 15)
    for layer, rows in zip((module.gate_proj, module.up_proj), before, strict=True):
        np.testing.assert_allclose(layer(x), rows, atol=1e-5)
        np.testing.assert_allclose(layer(x[:, :1]), rows[:, :1], atol=1e-5)


def test_one_product_for_all_that_ask_with_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _products(2)
    fuse_linears(module)
    calls: list[int] = []
    real = nn.Linear.__call__

    def counted(self: nn.Linear, x: mx.array) -> mx.array:
        calls.append(x.shape[-2])
        return real(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", counted)
    first, second = (mx.random.normal((1, 3, 64), key=mx.random.key(s)) for s in (1, 2))
    module.gate_proj(first)
    module.up_proj(first)
    assert calls == [3]
    # Who left a part behind must not be answered with it.
    module.gate_proj(second)
    found = module.up_proj(first)
    np.testing.assert_allclose(found, real(module.up_proj.own, first), atol=1e-5)
    calls.clear()
    single = first[:, :1]
    module.gate_proj(single)
    module.up_proj(single)
    assert calls == [1, 1]  # a single row is served as it was, by the kernel for one


def test_layers_that_differ_stay_apart() -> None:
    module = _products(2)
    module.up_proj = nn.Linear(32, 32, bias=False)
    assert fuse_linears(module) == 0
    assert not isinstance(module.gate_proj, FusedSlice)
    assert fuse_linears(_products(1)) == 0
