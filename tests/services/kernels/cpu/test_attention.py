"""Attention on the CPU by our own kernel: what MLX's gives, and the same bits in any company."""

import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.kernels.cpu.attention import attend
from tests.support.reference import for_the_cpu

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="macOS has MLX's Metal kernels"),
    for_the_cpu,
]

SLOTS = 200


def rows(count: int, heads: int = 6, kv_heads: int = 2, size: int = 64) -> Any:
    """Queries laid out as a model's are, and the first slots of larger buffers."""
    random = [mx.random.key(seed) for seed in range(3)]
    queries = mx.random.normal((1, count, heads, size), key=random[0]).swapaxes(1, 2)
    shape = (1, kv_heads, SLOTS + 56, size)
    keys, values = (mx.random.normal(shape, key=key)[..., :SLOTS, :] for key in random[1:])
    return queries, keys, values


def assert_mlx(queries: Any, keys: Any, values: Any, mask: Any) -> None:
    found = attend(queries, keys, values, 0.2, mask)
    assert found is not None
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=3e-6)


def test_it_is_attention() -> None:
    for count in (1, 3, 9, 100, SLOTS):
        tree = mx.random.uniform(shape=(count, SLOTS), key=mx.random.key(9)) < 0.6
        for mask in (None, "causal", tree):
            assert_mlx(*rows(count), mask)


def test_every_layout_of_heads() -> None:
    for heads, kv_heads, size in [(1, 1, 8), (4, 4, 40), (8, 1, 128), (2, 2, 256), (25, 5, 72)]:
        assert_mlx(*rows(5, heads, kv_heads, size), "causal")


def test_a_query_gives_the_same_bits_in_any_company() -> None:
    """Alone, in a chain, beside free slots: a verification sees what plain decoding would."""
    queries, keys, values = rows(7)
    together = attend(queries, keys, values, 0.2, "causal")
    assert together is not None
    for index in range(7):
        seen = SLOTS - 7 + index + 1
        own, alone = keys[..., :seen, :], queries[:, :, index : index + 1]
        found = attend(alone, own, values[..., :seen, :], 0.2, None)
        assert found is not None
        np.testing.assert_array_equal(np.array(found)[:, :, 0], np.array(together)[:, :, index])
        masked = attend(alone, keys, values, 0.2, mx.arange(SLOTS)[None] < seen)
        assert masked is not None
        np.testing.assert_array_equal(np.array(found), np.array(masked))


def test_hidden_slots_between_change_no_bit() -> None:
    """A row of a tree has its ancestors' slots, wherever they are, as if they stood together."""
    queries, keys, values = rows(5)
    mask = np.random.default_rng(3).random((5, SLOTS)) < 0.7
    mask[0, :150], mask[1] = True, True
    found = attend(queries, keys, values, 0.2, mx.array(mask))
    for row in range(5):
        seen = mx.array(np.flatnonzero(mask[row]))
        own = [mx.contiguous(mx.take(array, seen, axis=2)) for array in (keys, values)]
        alone = attend(queries[:, :, row : row + 1], *own, 0.2, None)
        assert found is not None
        assert alone is not None
        np.testing.assert_array_equal(np.array(found)[:, :, row], np.array(alone)[:, :, 0])


def test_far_scores_and_no_slots() -> None:
    """A slot that dominates takes all weight; a query that sees nothing gives zeros."""
    queries, keys, values = rows(2)
    assert_mlx(queries * 10, keys, values, "causal")
    nothing = attend(queries, keys, values, 0.2, mx.zeros((2, SLOTS), mx.bool_))
    assert nothing is not None
    assert not np.array(nothing).any()


def test_a_nan_is_not_hidden() -> None:
    queries, keys, values = rows(2)
    broken = attend(
        queries, mx.where(mx.arange(SLOTS)[:, None] == 3, mx.nan, keys), values, 1, None
    )
    assert broken is not None
    assert np.isnan(np.array(broken)).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q.astype(mx.float16), k, v, None),
        lambda q, k, v: (
            mx.concatenate([q, q]),
            mx.concatenate([k, k]),
            mx.concatenate([v, v]),
            None,
        ),
        lambda q, k, v: (q, k, v[..., :32], None),
        lambda q, k, v: (q, k, v, mx.zeros((3, SLOTS))),
        lambda q, k, v: (q, k.swapaxes(2, 3), v.swapaxes(2, 3), None),
    ],
    ids=["half", "batch", "two sizes", "added mask", "turned"],
)
def test_what_is_left_to_mlx(change: Any) -> None:
    *arrays, mask = change(*rows(3))
    assert attend(*arrays, 0.2, mask) is None
