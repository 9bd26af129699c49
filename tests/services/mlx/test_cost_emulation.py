"""A target of emulated cost: more weights, caches and kernels, and the same logits."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from protocol.errors import ModelError, UsageError
from protocol.jobs.cost_emulation import EmulatedSize, parse_size
from services.mlx.cost_emulation import SHAPES, emulate
from services.mlx.loader import load
from tests.support.reference import tiny_folder

FAMILIES = ["llama", "llama3", "sliding", "qwen2", "qwen3", "gemma2", "gemma3", "moe"]
TOKENS = mx.array([[5, 17, 250, 33, 8, 141, 77, 19, 203, 64]])


def weights(module: Any) -> list[mx.array]:
    named: Any = tree_flatten(module.parameters())
    return [array for _, array in named]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4x", EmulatedSize(4.0, "x")),
        ("2.5", EmulatedSize(2.5, "x")),
        ("8B", EmulatedSize(8.0, "B")),
        ("500m", EmulatedSize(500.0, "M")),
        ("16gb", EmulatedSize(16.0, "GB")),
    ],
)
def test_sizes_are_read(text: str, size: EmulatedSize) -> None:
    """A factor, a number of parameters, or bytes of weights."""
    assert size == parse_size(text)


@pytest.mark.parametrize("text", ["", "0x", "big", "-3B", "8 T", "B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """The complaint quotes it."""
    with pytest.raises(UsageError, match=repr(text)):
        parse_size(text)


def test_added_bytes() -> None:
    """A target of 100 weights of 4 bytes; added weights take 2 bytes."""
    assert [parse_size(text).bytes_to_add(100, 400, 2) for text in ("4x", "2B", "16GB")] == [
        1200.0,
        2e9 * 2 - 200,
        16e9 - 400,
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_and_the_layers_run(family: str) -> None:
    """Prefill and a step with caches: bit-equal, while every added layer fills its cache."""
    plain, dear = load(tiny_folder(family)).module, load(tiny_folder(family)).module
    before = len(dear.layers)
    emulate(dear, parse_size("30MB"))
    assert before < len(dear.layers)
    caches, dear_caches = make_prompt_cache(plain), make_prompt_cache(dear)
    for tokens in (TOKENS, TOKENS[:, :1], TOKENS[:, 2:5]):
        expected, actual = plain(tokens, cache=caches), dear(tokens, cache=dear_caches)
        assert np.array_equal(np.array(expected), np.array(actual))
    for cache in dear_caches[before:]:
        assert cache.offset == 14
        assert mx.any(cache.keys != 0).item()


def test_the_weights_weigh_what_was_asked_for() -> None:
    """Within half an added layer; each has memory of its own, and only projections are zero."""
    module = load(tiny_folder("llama")).module
    said = emulate(module, parse_size("60MB"))
    added = [layer.block.self_attn.q_proj.weight for layer in module.layers[-2:]]
    layer = SHAPES[0].parameters * added[0].itemsize
    assert abs(60e6 - sum(array.nbytes for array in weights(module))) < 0.6 * layer
    assert "60MB" in said
    assert SHAPES[0].name in said
    # numpy knows no bfloat16, which they are on a GPU.
    views = [np.asarray(weight.view(mx.uint16)) for weight in added]
    assert len({view.ctypes.data for view in views}) == len(added)
    assert all(np.any(view) for view in views)


def test_a_size_below_the_models_own_is_refused() -> None:
    """There is nothing to add."""
    module = load(tiny_folder("llama")).module
    with pytest.raises(ModelError, match="not smaller"):
        emulate(module, parse_size("1x"))


def test_a_size_beyond_the_memory_is_refused() -> None:
    """Before any of it is allocated."""
    module = load(tiny_folder("llama")).module
    with pytest.raises(ModelError, match="do not fit"):
        emulate(module, parse_size("900000B"))
    assert len(module.layers) == len(load(tiny_folder("llama")).module.layers)
