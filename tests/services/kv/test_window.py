"""A sliding layer's window: what each token sees, in whatever passes, and how much is held."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache

from services.kv.window import WindowCache


def rows_of(positions: Sequence[int]) -> mx.array:
    """[1, 1, n, 2] rows that name their positions."""
    return mx.array([[[[float(p + 1), 1.0] for p in positions]]])


def seen(cache: WindowCache, count: int, window: int | None = None) -> list[list[int]]:
    """The positions that each token of a pass sees."""
    mask = cache.make_mask(count, window_size=window)
    start = cache.offset
    keys, values = cache.update_and_fetch(
        rows_of(range(start, start + count)), rows_of(range(start, start + count))
    )
    assert bool(mx.array_equal(keys, values))
    # A layer that reads these keys too gets the same rows, which fit the mask.
    assert all(bool(mx.array_equal(keys, again)) for again in cache.keys_and_values())
    positions = np.array(keys)[0, 0, :, 0].astype(int) - 1
    if mask is None:
        visible = np.ones((count, len(positions)), bool)
    elif isinstance(mask, str):
        visible = np.tri(count, len(positions), len(positions) - count, dtype=bool)
    else:
        visible = np.array(mask)
    return [sorted(positions[row].tolist()) for row in visible]


def expected(position: int, window: int, keep: int) -> list[int]:
    first = max(keep, position - (window - keep) + 1)
    return [p for p in range(position + 1) if p < keep or p >= first]


@given(
    passes=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), min_size=1, max_size=20),
    window=st.integers(2, 40),
    keep=st.integers(0, 6),
    bucketed=st.booleans(),
)
def test_a_token_sees_its_window(
    *, passes: list[tuple[int, int]], window: int, keep: int, bucketed: bool
) -> None:
    """After any chains and rejections; and the first tokens, if they are kept."""
    keep = min(keep, window - 1)
    cache = WindowCache(window, keep, bucketed=bucketed)
    for count, rejected in passes:
        start = cache.offset
        found = seen(cache, count)
        assert found == [expected(p, window, keep) for p in range(start, start + count)]
        cache.cut(cache.offset - min(rejected, count - 1))
        cache.compact()


def test_a_model_may_ask_for_a_smaller_window() -> None:
    cache = WindowCache(8, 0, bucketed=False)
    seen(cache, 20)
    assert seen(cache, 1, 3) == [[18, 19, 20]]
    assert seen(cache, 2, 3) == [[19, 20, 21], [20, 21, 22]]
    assert seen(cache, 1, 50) == [list(range(16, 24))]


@pytest.mark.parametrize("keep", [0, 3])
def test_single_tokens_see_what_they_see_in_a_ring(keep: int) -> None:
    """mlx-lm's own cache, which holds the same rows in another order."""
    ring: Any = RotatingKVCache(max_size=8, keep=keep)
    cache = WindowCache(8, keep, bucketed=False)
    for position in range(40):
        row = rows_of([position])
        keys, _ = ring.update_and_fetch(row, row)
        theirs = sorted(p for p in (np.array(keys)[0, 0, :, 0].astype(int) - 1).tolist() if p >= 0)
        assert seen(cache, 1) == [theirs]


def test_the_memory_is_the_windows() -> None:
    """However long the sequence; a long prompt is let go of when it stands."""
    cache = WindowCache(128, 0, bucketed=False)
    seen(cache, 5000)
    cache.compact()
    held = sum(array.shape[2] for array in cache.state)
    assert held == 2 * 256
    for _ in range(300):
        seen(cache, 3)
        cache.compact()
    assert sum(array.shape[2] for array in cache.state) == held


def test_it_goes_back_as_far_as_its_rows() -> None:
    cache = WindowCache(8, 0, bucketed=False)
    seen(cache, 60)
    cache.compact()
    assert cache.can_cut(10)
    seen(cache, 60)
    cache.compact()
    assert [cache.can_cut(length) for length in (121, 120, 104, 103)] == [False, True, True, False]
    cache.cut(104)
    assert seen(cache, 1) == [list(range(97, 105))]


def test_a_snapshot_outlives_what_is_written_later() -> None:
    cache = WindowCache(8, 0, bucketed=False)
    seen(cache, 20)
    before = cache.capture()
    cache.cut(15)
    cache.update_and_fetch(rows_of([7] * 9), rows_of([7] * 9))
    cache.restore(before)
    assert seen(cache, 1) == [list(range(13, 21))]
