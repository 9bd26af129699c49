"""The attention kernel for CUDA, its source run on the host: what MLX's attention gives.

A CUDA device is not needed: the kernel's file is compiled as C++, each of its threads is one
of the host's. What only a device can show (that MLX compiles and feeds it) is tried when a
model is loaded there (`_works`).
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from services.engine.batch import MOST_SLOTS
from services.kernels.cuda import attention
from services.kernels.cuda.attention import (
    _takes,
    attend,
    attend_many,
    attend_table,
    count_parts,
    fit_chunk,
)
from tests.services.kernels.cuda.host import attend_gathered, compile_kernel, run_kernel

Array = npt.NDArray[Any]


class Kernel(NamedTuple):
    """One that is compiled for heads of a size, `sharing` of which have their keys together."""

    program: Path
    size: int
    sharing: int


@pytest.fixture(scope="module", params=[(64, 2), (128, 3), (256, 2)])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    size, sharing = request.param
    program = tmp_path_factory.mktemp("kernel") / "few_queries"
    compile_kernel("attention_host.cpp", program, SIZE=size, SHARING=sharing)
    return Kernel(program, size, sharing)


def _attention(
    kernel: Kernel, arrays: tuple[Array, Array, Array], seen: Array, part: int = 0, few: int = 64
) -> Array:
    """What the kernel gives for [heads, n, size], [kv heads, slots, size] and [n, slots].

    Args:
        kernel: the program.
        arrays: queries, keys and values.
        seen: which keys each query sees.
        part: keys that a block serves; 0: all.
        few: so many blocks do, those behind them serve more.
    """
    q, k, v = arrays
    with patch.object(attention, "_PART", part or 1), patch.object(attention, "_SHORT_PARTS", few):
        parts = count_parts(k.shape[1], attention._MANY_HEADS) if part else 1
    counts = [len(q), len(k), q.shape[1], k.shape[1], part, few, parts]
    found = run_kernel(kernel.program, counts, q, k, v, seen)
    return found.reshape(q.shape[1], len(q), q.shape[2]).swapaxes(0, 1)


def _arrays(kernel: Kernel, slots: int, rows: int = 3) -> tuple[Array, Array, Array]:
    """Queries of these tokens, keys and values of 2 heads."""
    size, random = kernel.size, np.random.default_rng(slots)
    shapes = [(2 * kernel.sharing, rows, size), (2, slots, size), (2, slots, size)]
    q, k, v = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize(
    ("rows", "slots", "part", "few"),
    [
        (3, 5, 0, 0),
        (3, 21, 0, 0),
        (9, 100, 0, 0),
        (3, 21, 16, 64),
        (9, 200, 64, 64),
        (3, 330, 8, 64),
        (3, 230, 16, 4),
    ],
)
@pytest.mark.parametrize("kind", ["all", "chain", "tree"])
def test_is_mlx_attention(
    kernel: Kernel, *, rows: int, slots: int, part: int, few: int, kind: str
) -> None:
    q, k, v = _arrays(kernel, slots, rows)
    seen = {
        "all": np.ones((rows, slots), bool),
        "chain": np.arange(slots)[None] <= np.arange(slots - rows, slots)[:, None],
        "tree": np.random.default_rng(1).random((rows, slots)) < 0.5,
    }[kind]
    seen[:, 0] = True
    expected: Any = mx.fast.scaled_dot_product_attention(
        *(mx.array(a)[None] for a in (q, k, v)), scale=q.shape[-1] ** -0.5, mask=mx.array(seen)
    )
    found = _attention(kernel, (q, k, v), seen, part, few)
    np.testing.assert_allclose(found, expected[0], atol=2e-5)


@pytest.mark.parametrize("part", [0, 4])
@pytest.mark.parametrize("at", ["keys", "values"])
def test_what_is_no_number_stays_none(kernel: Kernel, at: str, part: int) -> None:
    q, k, v = _arrays(kernel, 9)
    {"keys": k, "values": v}[at][0, 4, 7:9] = np.nan
    seen = np.ones((3, 9), bool)
    seen[1, 4] = False
    found, own = _attention(kernel, (q, k, v), seen, part), kernel.sharing
    assert np.isnan(found[:own, [0, 2]]).all()
    assert np.isfinite(found[:own, 1]).all()  # does not see it
    assert np.isfinite(found[own:]).all()  # other keys


@pytest.mark.parametrize("part", [0, 32])
def test_a_query_has_its_bits_in_any_company(kernel: Kernel, part: int) -> None:
    """Those behind it and slots that it does not see are nothing to it."""
    q, k, v = _arrays(kernel, 70, 9)
    chain = np.arange(70)[None] <= np.arange(61, 70)[:, None]
    all_rows = _attention(kernel, (q, k, v), chain, part)
    for row in (0, 4, 8):
        own = slice(row, row + 1)
        seen = chain[own, : 62 + row]
        alone = _attention(kernel, (q[:, own], k[:, : 62 + row], v[:, : 62 + row]), seen, part)
        np.testing.assert_array_equal(alone, all_rows[:, own])


@pytest.mark.parametrize(("part", "few"), [(64, 64), (16, 2)])
def test_a_query_has_its_bits_in_buffers_of_any_size(kernel: Kernel, part: int, few: int) -> None:
    """Parts are as long in all of them, and those behind a text add nothing."""
    q, k, v = _arrays(kernel, 150)
    seen = np.broadcast_to(np.arange(150) < 100, (3, 150))
    found = [
        _attention(kernel, (q, k[:, :slots], v[:, :slots]), seen[:, :slots], part, few)
        for slots in (100, 128, 150)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_a_part_has_the_bits_of_a_whole(kernel: Kernel) -> None:
    q, k, v = _arrays(kernel, 150)
    few = np.broadcast_to(np.arange(150) < 40, (3, 150))
    short = _attention(kernel, (q, k[:, :64], v[:, :64]), few[:, :64])
    np.testing.assert_array_equal(short, _attention(kernel, (q, k, v), few, 64))


@pytest.mark.parametrize("part", [0, 2, 32])
def test_scores_may_lie_far_apart(kernel: Kernel, part: int) -> None:
    """Of keys that different warps take, in either order: none is too large to be summed."""
    for far in (3, 40, 68):  # of 35 parts the last one, which a warp takes in its second turn
        q, k, v = _arrays(kernel, 70)
        k[:, far] = 400.0 * np.sign(q[:: kernel.sharing, 0])
        found = _attention(kernel, (q, k, v), np.ones((3, 70), bool), part)
        np.testing.assert_allclose(found[:: kernel.sharing, 0], v[:, far], atol=1e-5)


@pytest.mark.parametrize("part", [0, 3])
def test_a_query_that_sees_nothing_gets_nothing(kernel: Kernel, part: int) -> None:
    q, k, v = _arrays(kernel, 5)
    seen = np.ones((3, 5), bool)
    seen[2] = False
    found = _attention(kernel, (q, k, v), seen, part)
    assert not found[:, 2].any()
    assert found[:, :2].all()


def test_long_texts_have_few_parts() -> None:
    """Where many heads of keys have blocks of their own; no more than with a single head."""
    assert [count_parts(slots, 16) for slots in (512, 513, 4096, 8192, 32768)] == [1, 2, 8, 12, 24]
    assert [count_parts(slots, 4) for slots in (512, 8192, 16384, 32768)] == [1, 16, 32, 48]
    assert all(count_parts(slots, 16) <= count_parts(slots) for slots in range(1, MOST_SLOTS, 97))


def _call(count: int, slots: int, **more: Any) -> bool:
    """Whether our kernel serves such a call."""
    dtype = more.get("dtype", mx.float16)
    size = more.get("size", 64)
    queries = mx.zeros((more.get("batch", 1), 4, count, size), dtype)
    keys = mx.zeros((1, 2, slots, size), more.get("kv", dtype))
    values = mx.zeros((1, 2, slots, more.get("value_size", size)), dtype)
    return _takes(queries, keys, values, more.get("mask", mx.zeros((count, slots), mx.bool_)))


def test_which_calls_it_serves() -> None:
    assert all([_call(1, 256), _call(2, 256), _call(5, 1024), _call(8, 1024), _call(4, 2048)])
    assert all([_call(32, MOST_SLOTS), _call(100, 1024), _call(5, 512, size=256)])
    assert not any(
        [
            _call(200, 1024),  # reads the keys too often
            _call(40, 2048),
            _call(1, MOST_SLOTS + 1),
            _call(5, 2048, size=256),  # too much for a lane
            _call(5, 256, batch=2),
            _call(5, 256, size=80),
            _call(5, 256, dtype=mx.float32),
            _call(5, 256, kv=mx.float32),
            _call(5, 256, value_size=128),
            _call(5, 256, mask=mx.zeros((5, 255), mx.bool_)),
            _call(5, 256, mask=mx.zeros((5, 256), mx.float16)),
        ]
    )


def test_prompts_of_a_small_model_come_in_chunks_that_it_serves() -> None:
    """A wide model's come at once, and so does what is behind many tokens."""
    small, wide = (SimpleNamespace(args=SimpleNamespace(hidden_size=n)) for n in (576, 4096))
    assert [fit_chunk(small, 512, behind) for behind in (0, 100, 600)] == [64, 64, 64]
    assert fit_chunk(small, 40, 100) == 40
    assert fit_chunk(small, 512, 1000) == 512
    assert fit_chunk(wide, 512, 0) == 512
    assert fit_chunk(SimpleNamespace(), 512, 0) == 512


def test_many_queries_are_filled_up_to_a_number_that_recurs() -> None:
    """MLX's attention on CUDA plans anew for each number; the answer stays the same."""
    shapes = [(1, 4, 133, 64), (1, 2, 2048, 64), (1, 2, 2048, 64)]
    q, k, v = (mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate(shapes))
    seen = mx.arange(2048)[None] <= mx.arange(133)[:, None] + 10
    found = attend_many(q, k, v, 0.1, seen)
    expected: Any = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=seen)
    assert found is not None
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert attend_many(q[:, :, :128], k, v, 0.1, seen[:128]) is None  # recurs as it is
    assert attend_many(q[:, :, :3], k, v, 0.1, seen[:3]) is None  # `attend`'s
    assert attend_many(q, k, v, 0.1, "causal") is None


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("size", "slots"), [(64, 256), (128, 256), (64, 20480), (128, 20480)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_table_is_attended_as_mlx_does(size: int, slots: int, dtype: mx.Dtype) -> None:
    """Five rows of three sequences in seats of so many slots; heads of a token side by side.

    The last row sees nearly all of them, and has the bits that it has without company.
    """
    shapes = [(1, 5, 24, size), (8, 4 * slots, size), (8, 4 * slots, size)]
    q, k, v = (mx.random.normal(s, dtype, key=mx.random.key(i)) for i, s in enumerate(shapes))
    first = mx.array([2, 0, 0, 3, 3], mx.int32) * slots
    ends = mx.array([[7], [200], [201], [31], [slots - 3]])
    queries, mask = q.swapaxes(1, 2), mx.arange(slots)[None] < ends
    found = attend_table(queries, k, v, mask, first, size**-0.5)
    expected = attend_gathered(queries, k, v, mask, first, size**-0.5).astype(mx.float32)
    distance: Any = mx.linalg.norm(found.astype(mx.float32) - expected)
    assert distance.item() < 0.01 * float(mx.linalg.norm(expected))
    own, seat = queries[:, :, 4:], slice(3 * slots, None)
    alone = attend(own, k[None, :, seat], v[None, :, seat], size**-0.5, mask[4:])
    assert alone is not None
    assert mx.array_equal(alone, found[:, :, 4:])


def test_a_table_of_another_kind_is_refused() -> None:
    """What the kernel does not take is found out before a model is served with it."""
    rows = mx.zeros((1, 4, 3, 80), mx.float16)
    table = mx.zeros((2, 512, 80), mx.float16)
    mask, first = mx.ones((3, 256), mx.bool_), mx.zeros(3, mx.int32)
    with pytest.raises(TypeError, match="size 80"):
        attend_table(rows, table, table, mask, first, 1.0)
