"""RoPE for tokens side by side: bit for bit, or nearly, the layer's own, one token at a time."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import (
    DynamicNTKScalingRoPE,
    ProportionalRoPE,
    SuScaledRoPE,
    initialize_rope,
)

from protocol.errors import ModelError
from services.mlx.loader import load
from services.mlx.rope import BranchRope, TableRope, allow_branches, use_tables
from tests.support.reference import for_the_cpu, tiny_folder

SIZE = 16
POSITIONS = [5, 5, 0, 1999, 6, 7, 123, 6]
STARTS = [0, 1, 77, 1990]

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

Make = Callable[[], Any]


def rope_of(
    *,
    dims: int = SIZE,
    base: float = 1e4,
    traditional: bool = False,
    scaling: dict[str, Any] | None = None,
) -> Any:
    return initialize_rope(dims, base, traditional, scaling, max_position_embeddings=512)


MAKERS: dict[str, Make] = {
    "default": rope_of,
    "other base": lambda: rope_of(base=500.0),
    "linear": lambda: rope_of(scaling={"type": "linear", "factor": 4.0}),
    "llama3": lambda: rope_of(scaling=LLAMA3),
    "yarn": lambda: rope_of(scaling=YARN),
    "partial": lambda: rope_of(dims=SIZE // 2),
    "partial yarn": lambda: rope_of(dims=SIZE // 2, scaling=YARN),
    "proportional": lambda: ProportionalRoPE(SIZE, SIZE // 2, base=1e4),
    "traditional": lambda: rope_of(traditional=True),
    "partial traditional": lambda: rope_of(dims=SIZE // 2, traditional=True),
    "longrope": lambda: SuScaledRoPE(SIZE, 1e4, 512, 64, [1.0] * 8, [1.5] * 8),
}
TABLED = [name for name in MAKERS if "traditional" not in name]


class Layer(nn.Module):
    """Something with a RoPE, like an attention layer."""

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.rope = rope


class Model(nn.Module):
    """Layers with these RoPEs."""

    def __init__(self, *ropes: Any) -> None:
        super().__init__()
        self.layers = [Layer(rope) for rope in ropes]


def vectors(tokens: int, seed: int = 0) -> mx.array:
    """[1, heads, tokens, size]."""
    return mx.array(np.random.default_rng(seed).standard_normal((1, 3, tokens, SIZE)), mx.float32)


def one_by_one(rope: Any, x: mx.array, positions: list[int]) -> np.ndarray[Any, Any]:
    """The layer's own RoPE, one token at a time."""
    rows = [rope(x[:, :, i : i + 1], offset=at) for i, at in enumerate(positions)]
    return np.array(mx.concatenate(rows, axis=2))


@pytest.mark.parametrize("kind", MAKERS)
def test_branches_are_rotated_bit_for_bit(kind: str) -> None:
    """An array of positions rotates token i by positions[i], exactly as alone."""
    rope = MAKERS[kind]()
    x = vectors(len(POSITIONS))
    branch = BranchRope(rope)(x, offset=mx.array(POSITIONS, mx.int32))
    np.testing.assert_array_equal(one_by_one(rope, x, POSITIONS), np.array(branch))


@pytest.mark.parametrize("kind", MAKERS)
def test_chains_are_left_to_the_layers_own_rope(kind: str) -> None:
    """One position rotates a chain from there on, exactly as without the wrapper."""
    rope = MAKERS[kind]()
    for start in STARTS:
        x = vectors(6, start)
        expected = np.array(rope(x, offset=start))
        np.testing.assert_array_equal(expected, np.array(BranchRope(rope)(x, offset=start)))
        np.testing.assert_allclose(
            one_by_one(rope, x, list(range(start, start + 6))), expected, atol=1e-6
        )


@for_the_cpu
@pytest.mark.parametrize("kind", TABLED)
def test_tables_rotate_like_the_layers_own_rope(kind: str) -> None:
    """Chains and branches, in any order, to within rounding of float32."""
    rope = MAKERS[kind]()
    model = Model(rope)
    use_tables(model)
    tabled = model.layers[0].rope
    assert isinstance(tabled, TableRope)
    for seed, start in enumerate([*STARTS, 77, 77, 0]):
        for tokens in (6, 1, 4):
            x = vectors(tokens, seed)
            positions = list(range(start, start + tokens))
            expected = one_by_one(rope, x, positions)
            np.testing.assert_allclose(expected, np.array(tabled(x, offset=start)), atol=2e-6)
            positions = POSITIONS[:tokens]
            expected = one_by_one(rope, x, positions)
            told = mx.array(positions, mx.int32)
            for _ in range(2):
                np.testing.assert_allclose(expected, np.array(tabled(x, offset=told)), atol=2e-6)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_position_may_be_an_array_of_no_dimensions(kind: str) -> None:
    """Gemma 4 hands over the first position of a chain like that; it is one number all the same."""
    rope = MAKERS[kind]()
    model = Model(rope)
    if not mx.cuda.is_available():
        use_tables(model)
    for turn in (BranchRope(rope), model.layers[0].rope):
        for start in STARTS:
            x = vectors(6, start)
            expected = np.array(rope(x, offset=start))
            np.testing.assert_allclose(expected, np.array(turn(x, mx.array(start))), atol=2e-6)


@pytest.mark.parametrize("kind", sorted(set(MAKERS) - set(TABLED)))
def test_what_tables_cannot_do_stays_as_it_is(kind: str) -> None:
    """Interleaved pairs, and RoPEs that do not say how much they rotate, keep their own."""
    rope = MAKERS[kind]()
    model = Model(rope)
    use_tables(model)
    assert model.layers[0].rope is rope


@for_the_cpu
def test_layers_of_equal_rope_share_their_tables() -> None:
    """The sines of one frame are computed once for all layers that are alike, and only those."""
    makers = ("default", "other base", "default", "partial", "other base", "llama3")
    ropes = [MAKERS[kind]() for kind in makers]
    model = Model(*ropes)
    calls: list[str] = []

    def counted(kind: str, rope: Any) -> Any:
        class Counting(nn.Module):
            def __call__(self, x: mx.array, offset: int = 0) -> Any:
                calls.append(kind)
                return rope(x, offset=offset)

        counting = Counting()
        counting.dims, counting.traditional = rope.dims, rope.traditional
        return counting

    for layer, kind, rope in zip(model.layers, makers, ropes, strict=True):
        layer.rope = counted(kind, rope)
    use_tables(model)
    x = vectors(3)
    for start in (4, 9):
        calls.clear()
        for layer, rope in zip(model.layers, ropes, strict=True):
            expected = np.array(rope(x, offset=start))
            np.testing.assert_allclose(expected, np.array(layer.rope(x, start)), atol=2e-6)
        assert sorted(set(makers)) == sorted(calls)


def test_every_layer_is_wrapped_once() -> None:
    """`allow_branches` wraps all layers of a model, leaves tables alone, and may be repeated."""
    module = load(tiny_folder("gemma3")).module
    allow_branches(module)
    wrapped = [layer.self_attn.rope for layer in module.layers]
    assert all(isinstance(rope, BranchRope) for rope in wrapped)
    allow_branches(module)
    assert [layer.self_attn.rope for layer in module.layers] == wrapped
    tabled = load(tiny_folder("gemma3")).module
    use_tables(tabled)
    allow_branches(tabled)
    assert all(isinstance(layer.self_attn.rope, TableRope) for layer in tabled.layers)


@pytest.mark.parametrize("tables", [False, pytest.param(True, marks=for_the_cpu)])
@pytest.mark.parametrize(
    "family", ["llama", "llama3", "linear", "yarn", "gemma3", "gemma4", "glm4"]
)
def test_models_compute_the_same_with_it(family: str, *, tables: bool) -> None:
    """Wrapped or tabled, a model gives the logits it gave before."""
    module = load(tiny_folder(family)).module
    tokens = mx.array(np.random.default_rng(1).integers(4, 280, (1, 20)))
    expected = np.array(module(tokens))
    if tables:
        use_tables(module)
    allow_branches(module)
    np.testing.assert_allclose(expected, np.array(module(tokens)), atol=2e-4)


def test_models_without_rope_are_refused() -> None:
    """What has no positions to set cannot draft trees."""
    with pytest.raises(ModelError, match="no rotary position embedding"):
        allow_branches(load(tiny_folder("mamba")).module)


def test_dynamic_scaling_is_refused_for_branches_and_left_alone_by_tables() -> None:
    """A base that depends on the length is the same for all tokens of a forward, so no tree."""
    module = load(tiny_folder("dynamic")).module
    use_tables(module)
    assert all(isinstance(layer.self_attn.rope, DynamicNTKScalingRoPE) for layer in module.layers)
    with pytest.raises(ModelError, match="dynamic NTK"):
        allow_branches(module)
