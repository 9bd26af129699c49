"""Attention of a few queries for Metal, its source run on the host: what MLX's attention gives."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.kernels.metal.attention import attend, takes
from tests.services.kernels.metal.host import HostMetal

_HEADS, _KV_HEADS = 6, 2


def _arrays(
    count: int, slots: int, size: int = 64, dtype: mx.Dtype = mx.float16
) -> tuple[mx.array, mx.array, mx.array]:
    shapes = [(1, _HEADS, count, size), (1, _KV_HEADS, slots, size), (1, _KV_HEADS, slots, size)]
    q, k, v = (mx.random.normal(s, dtype, key=mx.random.key(i)) for i, s in enumerate(shapes))
    return q, k, v


def _mask(kind: str, count: int, slots: int) -> mx.array | str | None:
    if kind == "tree":
        seen = mx.random.uniform(shape=(count, slots), key=mx.random.key(7)) < 0.5
        return seen | (mx.arange(slots) == 0)
    return {"all": None, "causal": "causal"}[kind]


def _assert_near(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> None:
    exact: Any = mx.fast.scaled_dot_product_attention(
        *(a.astype(mx.float32) for a in (q, k, v)), scale=0.125, mask=mask
    )
    found = attend(q, k, v, 0.125, mask)
    assert found.shape == q.shape
    step = 2**-11 if q.dtype == mx.float16 else 2**-8
    np.testing.assert_allclose(
        np.array(found.astype(mx.float32)), np.array(exact), rtol=1.01 * step, atol=1e-5
    )


@pytest.mark.parametrize("slots", [37, 530])
@pytest.mark.parametrize("kind", ["all", "causal", "tree"])
def test_is_mlx_attention(host: HostMetal, slots: int, kind: str) -> None:
    """Of 15 rows for each head of the keys; in one chunk of keys, and in three that are merged."""
    count = 5
    _assert_near(*_arrays(count, slots), _mask(kind, count, slots))
    assert len(host.launches) == (1 if slots == 37 else 2)


@pytest.mark.parametrize(
    ("size", "dtype"), [(96, mx.float16), (128, mx.float16), (128, mx.bfloat16)]
)
def test_other_sizes_and_types(host: HostMetal, size: int, dtype: mx.Dtype) -> None:
    _assert_near(*_arrays(3, 300, size, dtype), "causal")


def test_a_row_has_the_same_bits_in_any_company(host: HostMetal) -> None:
    """A query alone, with only the keys that it sees, across the border of a chunk."""
    count, slots = 9, 259
    q, k, v = _arrays(count, slots)
    together = attend(q, k, v, 0.125, "causal")
    for row in range(count):
        end = slots - count + row + 1
        alone = attend(q[:, :, row : row + 1], k[..., :end, :], v[..., :end, :], 0.125, None)
        assert mx.array_equal(alone[:, :, 0], together[:, :, row]).item()


def test_a_row_of_a_tree_has_the_bits_of_a_chain(host: HostMetal) -> None:
    """What it does not see behind what it sees changes nothing."""
    q, k, v = _arrays(2, 300)
    ends = mx.array([[250], [299]])
    found = attend(q, k, v, 0.125, mx.arange(300)[None] < ends)
    for row, end in enumerate((250, 299)):
        alone = attend(q[:, :, row : row + 1], k[..., :end, :], v[..., :end, :], 0.125, None)
        assert mx.array_equal(alone[:, :, 0], found[:, :, row]).item()


def test_what_is_no_number_stays_none(host: HostMetal) -> None:
    """A key that is none shows in the rows that see it, and in no other."""
    q, k, v = _arrays(3, 41)
    k[0, 0, 4, 3] = mx.nan
    seen = mx.ones((3, 41), mx.bool_)
    seen[1, 4] = False
    bad = mx.isnan(attend(q, k, v, 0.125, seen)).any(axis=-1)[0]
    assert bad.tolist() == [[True, False, True]] * 3 + [[False] * 3] * 3


def test_a_query_that_sees_nothing_gets_nothing(host: HostMetal) -> None:
    q, k, v = _arrays(3, 41)
    seen = mx.ones((3, 41), mx.bool_)
    seen[2] = False
    found = attend(q, k, v, 0.125, seen)
    assert not found[:, :, 2].any().item()
    assert found[:, :, :2].all().item()


def _call(count: int, slots: int, **more: Any) -> bool:
    dtype = more.get("dtype", mx.float16)
    queries = mx.zeros((more.get("batch", 1), 4, count, more.get("size", 64)), dtype)
    keys = mx.zeros((1, 2, slots, 64), more.get("kv", dtype))
    values = mx.zeros((1, 2, slots, more.get("value_size", 64)), dtype)
    return takes(queries, keys, values, more.get("mask", "causal"))


def test_which_calls_it_serves() -> None:
    tree = mx.zeros((5, 256), mx.bool_)
    assert all([_call(1, 1, mask=None), _call(5, 256, mask=tree), _call(16, 9000)])
    assert not any(
        [
            _call(17, 256),
            _call(5, 4),
            _call(5, 256, batch=2),
            _call(5, 256, size=80),
            _call(5, 256, dtype=mx.float32),
            _call(5, 256, kv=mx.bfloat16),
            _call(5, 256, value_size=128),
            _call(5, 255, mask=tree),
            _call(5, 256, mask=mx.zeros((5, 256), mx.float16)),
            _call(1, 7, mask=mx.ones((1, 7), mx.bool_)),  # in another address space
        ]
    )
