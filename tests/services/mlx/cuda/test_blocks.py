"""Decoder blocks in traces on CUDA: their wiring, with MLX's operations in the kernels' places.

The last test runs the kernels themselves, on a CUDA device.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from services.mlx.cuda import blocks, choice, product
from services.mlx.cuda.blocks import use_blocks
from services.mlx.cuda.choice import in_trace, use_products
from services.mlx.cuda.equip import equip_for_cuda
from services.mlx.cuda.rotate import Heads
from services.mlx.fused_linear import fuse_linears
from services.mlx.loader import load
from services.mlx.rope import allow_branches
from services.mlx.traced_forward import LayerInputs, find_slots
from tests.support.reference import tiny_folder

SLOTS = 32


class Kernels:
    """Stand in for the kernels, and count."""

    def __init__(self, factor: float = 1.0) -> None:
        self.calls: list[str] = []
        self.factor = factor

    def multiply(self, x: mx.array, weight: mx.array) -> mx.array:
        self.calls.append("multiply")
        return x @ weight.T

    def multiply_add(self, x: mx.array, weight: mx.array, more: mx.array) -> mx.array:
        self.calls.append("multiply_add")
        return self.factor * (x @ weight.T) + more

    def multiply_gated(self, x: mx.array, weight: mx.array) -> mx.array:
        self.calls.append("multiply_gated")
        gate, up = mx.split(x @ weight.T, 2, axis=-1)
        gated: mx.array = nn.silu(gate) * up
        return gated

    def rotate(self, x: mx.array, positions: mx.array, layer: Heads) -> list[mx.array]:
        self.calls.append("rotate")
        rows, size = x.shape[1], layer.size
        heads = x.reshape(1, rows, -1, size).swapaxes(1, 2)
        ends = [layer.heads, layer.heads + layer.kv_heads]
        parts: Any = mx.split(heads, ends, axis=1)
        eps: Any = layer.eps.item()
        if layer.gains.size > 1:
            for at, gain in enumerate(layer.gains):
                parts[at] = mx.fast.rms_norm(parts[at], gain, eps)
        if positions.size == 1:
            positions = positions + mx.arange(rows)
        angles = positions[:, None] * layer.speeds
        half = layer.rotated // 2
        for at in range(2):
            first, second, rest = mx.split(parts[at], [half, layer.rotated], axis=-1)
            cos, sin = mx.cos(angles), mx.sin(angles)
            turned = [first * cos - second * sin, first * sin + second * cos, rest]
            parts[at] = mx.concatenate(turned, axis=-1)
        found: list[mx.array] = parts
        return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return install(monkeypatch, Kernels())


def install(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> Kernels:
    for name in ("multiply", "multiply_add", "multiply_gated"):
        monkeypatch.setattr(product, name, getattr(kernels, name))
    monkeypatch.setattr(blocks, "rotate", kernels.rotate)
    monkeypatch.setattr(blocks, "SIZES", range(2, 300))
    monkeypatch.setattr(product, "TYPES", (mx.float32,))
    monkeypatch.setattr(choice, "compute_unit", lambda: "cuda")
    monkeypatch.setattr(choice, "_use", choice._Use())
    times = iter([1.0, 2.0] * 7)  # ours is timed first
    monkeypatch.setattr(choice, "time_pass", lambda _: next(times))
    monkeypatch.setattr(blocks, "time_in_turn", lambda _: [1.0, 2.0])
    return kernels


def run(module: Any, tokens: list[int], start: int, *, rows: bool = False) -> mx.array:
    """Logits of these tokens behind random ones, as a trace computes them."""
    layers = module.model.layers
    attention = layers[0].self_attn
    heads = attention.n_kv_heads
    size = attention.o_proj.weight.shape[1] // attention.n_heads
    key = iter(mx.random.split(mx.random.key(7), 2 * len(layers)))
    first = mx.array(start)
    slots = find_slots(first, len(tokens))
    positions = start + mx.arange(len(tokens)) if rows else None
    seen = mx.arange(SLOTS)[None] <= start + mx.arange(len(tokens))[:, None]
    caches = [
        LayerInputs(
            mx.random.normal((1, heads, SLOTS, size), key=next(key)),
            mx.random.normal((1, heads, SLOTS, size), key=next(key)),
            slots,
            first,
            positions,
            seen if rows else None,
        )
        for _ in layers
    ]
    logits: mx.array = module(mx.array([tokens]), cache=caches)
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rows", [False, True], ids=["chain", "rows"])
def test_blocks_of_a_trace_go_through_the_kernels(
    kernels: Kernels, family: str, *, rows: bool
) -> None:
    module = load(tiny_folder(family)).module
    allow_branches(module)
    expected = run(module, [5, 6, 7], 9, rows=rows)
    fuse_linears(module)
    assert use_products(module) is not None
    probe = use_blocks(module)
    assert probe is not None
    assert (probe.least_rows, probe.layers) == (1, len(module.model.layers))
    kernels.calls.clear()
    plain = run(module, [5, 6, 7], 9, rows=rows)
    assert kernels.calls == []
    with in_trace():
        found = run(module, [5, 6, 7], 9, rows=rows)
    of_a_block = ["multiply", "rotate", "multiply_add", "multiply_gated", "multiply_add"]
    assert kernels.calls[:-1] == of_a_block * len(module.model.layers)
    for other in (plain, found):
        np.testing.assert_allclose(np.array(other), np.array(expected), atol=2e-4)


def test_what_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Kernels(factor=1.2))
    module = load(tiny_folder("llama")).module
    fuse_linears(module)
    use_products(module)
    kinds = [type(layer) for layer in module.model.layers]
    probe = use_blocks(module)
    assert probe is not None
    assert probe.reason.startswith("what they compute is 0.")
    assert [type(layer) for layer in module.model.layers] == kinds


def test_what_is_slower_is_not_used(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(tiny_folder("llama")).module
    fuse_linears(module)
    use_products(module)
    monkeypatch.setattr(blocks, "time_in_turn", lambda _: [1.0, 1.0])
    probe = use_blocks(module)
    assert probe is not None
    assert (probe.least_rows, probe.reason) == (0, "they are not faster than MLX's")
    assert not any(hasattr(layer, "cuda_kernels") for layer in module.model.layers)


@pytest.mark.parametrize("family", ["moe", "mamba", "gemma3"])
def test_blocks_of_other_kinds_stay_as_they_are(kernels: Kernels, family: str) -> None:
    module = load(tiny_folder(family)).module
    fuse_linears(module)
    use_products(module)
    assert use_blocks(module) is None


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("count", [1, 4, 9, 17])
def test_the_kernels_compute_what_mlx_does(family: str, count: int) -> None:
    module = load(tiny_folder(family)).module
    module.set_dtype(mx.float16)
    allow_branches(module)
    tokens = [5 + at for at in range(count)]
    expected = run(module, tokens, 9).astype(mx.float32)
    equip_for_cuda(module)
    with in_trace():
        found = run(module, tokens, 9).astype(mx.float32)
    distance: Any = mx.linalg.norm(found - expected) / mx.linalg.norm(expected)
    assert distance.item() < 0.01
