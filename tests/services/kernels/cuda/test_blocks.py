"""Decoder blocks in traces on CUDA: their wiring, with MLX's operations in the kernels' places.

The last test runs the kernels themselves, on a CUDA device.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from protocol.jobs.kernel_report import KernelProbe
from services.engine.batch import BatchArrays
from services.kernels.cuda import blocks, choice, product
from services.kernels.cuda.blocks import (
    BlockKernels,
    equip_for_cuda,
    find_kernels,
    route_through,
    serves_any_length,
)
from services.kernels.cuda.choice import in_trace, use_products
from services.kernels.cuda.kv_rows import TracedLayer
from services.kernels.cuda.rotate import Heads
from services.mlx import selftest
from services.mlx.fused_linear import fuse_linears
from services.mlx.loader import load
from services.mlx.patches import install as install_patches
from services.mlx.rope import allow_branches
from services.runtime.preparation import Steps, run_all
from tests.services.runtime.steps import at_once
from tests.support.reference import tiny_folder
from tests.support.tiny_models import write_tiny_model

SLOTS = 64
POSITIONS = [9, 10, 10]
"""Of rows side by side: two follow the same one."""


def equip(module: Any) -> list[KernelProbe]:
    """As a model is prepared on CUDA."""
    fuse_linears(module)
    return run_all(equip_for_cuda(module))


class Kernels:
    """Stand in for the kernels, and count."""

    def __init__(self, factor: float = 1.0) -> None:
        self.calls: list[str] = []
        self.factor = factor

    def multiply(
        self,
        x: mx.array,
        weight: mx.array,
        *,
        norm: product.Norm | None = None,
        more: mx.array | None = None,
        gated: bool = False,
    ) -> mx.array:
        self.calls.append("multiply" if norm is None else "multiply normed")
        x = (x if norm is None else mx.fast.rms_norm(x, *norm)) @ weight.T
        if gated:
            gate, up = mx.split(x, 2, axis=-1)
            x = nn.silu(gate) * up
        if more is None:
            return x
        return more + (self.factor * x if more.ndim > 1 else x)

    def rotate(self, x: mx.array, positions: mx.array, layer: Heads) -> list[mx.array]:
        self.calls.append("rotate")
        rows, size = x.shape[1], layer.size
        heads = x.reshape(1, rows, -1, size).swapaxes(1, 2)
        ends = [layer.heads, layer.heads + layer.kv_heads]
        parts: Any = mx.split(heads, ends, axis=1)
        assert positions.shape == (rows,)
        if layer.norm is not None:
            for at, gain in enumerate(layer.norm.gains):
                parts[at] = mx.fast.rms_norm(parts[at], gain, layer.norm.eps)
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
    """Let these be chosen, here; the kernels take the sizes of tiny models, and are faster."""
    monkeypatch.setattr(product, "multiply", kernels.multiply)
    monkeypatch.setattr(blocks, "rotate", kernels.rotate)
    monkeypatch.setattr(blocks, "SIZES", range(2, 300))
    monkeypatch.setattr(product, "TYPES", (mx.float32,))
    monkeypatch.setattr(choice, "compute_unit", lambda: "cuda")
    pretend_times(monkeypatch)
    return kernels


def pretend_times(
    monkeypatch: pytest.MonkeyPatch, products: float = 0.5, blocks: float = 0.5
) -> None:
    """Let our kernels take these shares of MLX's time."""

    def time_in_turn(ways: list[Any]) -> Steps[list[float]]:
        is_product = getattr(ways[0], "func", None) is choice._repeat
        return at_once([1.0, products if is_product else blocks])

    monkeypatch.setattr(selftest, "time_in_turn", time_in_turn)


def run(module: Any, tokens: list[int], start: int, positions: list[int] | None = None) -> mx.array:
    """Logits of these tokens behind random ones, as a trace computes them.

    Args:
        module: the model.
        tokens: of the pass.
        start: their first slot, and in a chain the first one's position.
        positions: of rows side by side.
    """
    layers = module.model.layers
    attention = layers[0].self_attn
    heads, dtype = attention.n_kv_heads, module.model.norm.weight.dtype
    size = attention.o_proj.weight.shape[1] // attention.n_heads
    key = iter(mx.random.split(mx.random.key(7), 2 * len(layers)))
    first = mx.array(start)
    seen = mx.arange(SLOTS)[None] <= start + mx.arange(len(tokens))[:, None]
    own = () if positions is None else (mx.array(positions), seen)
    batch = BatchArrays(mx.array([tokens]), first, *own)
    caches = [
        TracedLayer(
            mx.random.normal((1, heads, SLOTS, size), dtype, key=next(key)),
            mx.random.normal((1, heads, SLOTS, size), dtype, key=next(key)),
            batch,
        )
        for _ in layers
    ]
    logits: mx.array = module(batch.tokens, cache=caches)
    return logits


FAMILIES = ["llama", "llama3", "linear", "qwen2", "qwen3", "sliding"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["chain", "rows"])
def test_blocks_of_a_trace_go_through_the_kernels(
    kernels: Kernels, family: str, positions: list[int] | None
) -> None:
    if family == "sliding" and positions:
        pytest.skip("rows side by side are not traced through a window")
    module = load(tiny_folder(family)).module
    allow_branches(module)
    expected = run(module, [5, 6, 7], 9, positions)
    probes = {probe.kernel: probe for probe in equip(module)}
    assert (probes["block"].least_rows, probes["block"].most_rows) == (1, 64)
    assert probes["block"].layers == len(module.model.layers)
    kernels.calls.clear()
    plain = run(module, [5, 6, 7], 9, positions)
    assert kernels.calls == []
    with in_trace():
        found = run(module, [5, 6, 7], 9, positions)
    of_a_block = ["multiply normed", "rotate", "multiply", "multiply normed", "multiply"]
    assert kernels.calls[:-1] == of_a_block * len(module.model.layers)
    for other in (plain, found):
        np.testing.assert_allclose(np.array(other), np.array(expected), atol=2e-4)


@pytest.mark.usefixtures("kernels")
def test_kernels_come_in_the_order_of_the_layers() -> None:
    """A kernel that computes all of them relies on it; MLX walks modules from the last on."""
    module = load(tiny_folder("llama")).module
    assert find_kernels(module) == []
    equip(module)
    layers = module.model.layers
    assert len(layers) > 1
    assert find_kernels(module) == [layer.kernels for layer in layers]


def probe_of(module: Any) -> Any:
    return next((probe for probe in equip(module) if probe.kernel == "block"), None)


def test_what_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Kernels(factor=1.2))
    module = load(tiny_folder("llama")).module
    kinds = [type(layer) for layer in module.model.layers]
    probe = probe_of(module)
    assert probe.reason.startswith("its result is 0.")
    assert [type(layer) for layer in module.model.layers] == kinds


@pytest.mark.parametrize(("own", "used"), [(1.0, True), (1.03, True), (1.1, False)])
def test_what_is_slower_is_not_used(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, own: float, *, used: bool
) -> None:
    """But what scatters is."""
    module = load(tiny_folder("llama")).module
    pretend_times(monkeypatch, blocks=own)
    probe = probe_of(module)
    expected = (1, "") if used else (0, "they are slower than MLX's")
    assert (probe.least_rows, probe.reason) == expected
    assert all(hasattr(layer, "kernels") is used for layer in module.model.layers)


def test_without_our_products_there_are_no_blocks(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_times(monkeypatch, products=1.0)
    module = load(tiny_folder("llama")).module
    [products] = equip(module)
    assert (products.kernel, products.least_rows) == ("product", 0)


def test_a_second_call_takes_the_place_of_the_first(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(tiny_folder("llama")).module
    plain = [type(layer) for layer in module.model.layers]
    assert probe_of(module).least_rows == 1
    kinds = [type(layer) for layer in module.model.layers]
    assert kinds != plain
    for attends in (True, False):
        monkeypatch.setattr(blocks, "attends_any_length", lambda *_, found=attends: found)
        assert serves_any_length(module) is attends
    assert probe_of(module).least_rows == 1
    assert [type(layer) for layer in module.model.layers] == kinds
    pretend_times(monkeypatch, blocks=2.0)
    assert probe_of(module).least_rows == 0
    assert [type(layer) for layer in module.model.layers] == plain
    monkeypatch.setattr(blocks, "attends_any_length", lambda *_: True)
    assert not serves_any_length(module)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("moe", {}),
        ("mamba", {}),
        ("gemma3", {}),
        ("yarn", {}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"rope_traditional": True}),
    ],
)
def test_blocks_of_other_kinds_stay_as_they_are(
    kernels: Kernels, family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    module = load(write_tiny_model(tmp_path / "model", family, config=config)).module
    assert probe_of(module) is None


@pytest.mark.parametrize("odd", ["kind", "type"])
def test_a_block_that_is_normed_otherwise_stays_as_it_is(kernels: Kernels, odd: str) -> None:
    layers = (module := load(tiny_folder("llama")).module).model.layers
    norm = layers[0].post_attention_layernorm
    if odd == "kind":
        layers[0].post_attention_layernorm = nn.LayerNorm(norm.weight.size, bias=False)
    else:
        norm.weight = norm.weight.astype(mx.float16)
    assert probe_of(module).layers == len(layers) - 1
    assert not hasattr(layers[0], "kernels")


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["chain", "rows"])
def test_the_kernels_compute_what_mlx_does(
    family: str, dtype: mx.Dtype, positions: list[int] | None, tmp_path: Path
) -> None:
    """Whether they are faster or not."""
    config = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4}
    module = load(write_tiny_model(tmp_path / "model", family, config=config)).module
    module.set_dtype(dtype)
    allow_branches(module)
    counts = [3] if positions else [1, 4, 9, 17, 33]
    lists = [[5 + at for at in range(count)] for count in counts]
    expected = [run(module, tokens, 9, positions).astype(mx.float32) for tokens in lists]
    fuse_linears(module)
    assert run_all(use_products(module)) is not None
    few = module.model.layers[0].self_attn.o_proj.few_rows
    few.least, few.most = 1, 64
    install_patches(route_through(layer, BlockKernels(layer)) for layer in module.model.layers)
    for tokens, right in zip(lists, expected, strict=True):
        with in_trace():
            found = run(module, tokens, 9, positions).astype(mx.float32)
        distance: Any = mx.linalg.norm(found - right) / mx.linalg.norm(right)
        assert distance.item() < (0.01 if dtype == mx.float16 else 0.05)
