"""Where weights lie that every pass reads."""

import gc
import mmap
import weakref

import numpy as np
import pytest

from services.mlx.weight_memory import LINE, WeightMemory


def test_arrays_are_the_same_there() -> None:
    """Of any size and type, also larger than what is taken at once; none touches another."""
    memory = WeightMemory()
    random = np.random.default_rng(1)
    arrays = [
        random.integers(-127, 127, (5, 3, 7), np.int8),
        random.normal(size=(1000, 33)).astype(np.float32),
        np.empty(0, np.float32),
        np.zeros(40 << 20, np.uint8),
        random.normal(size=11).astype(np.float32),
    ]
    placed = [memory.copy(array) for array in arrays]
    placed[3] += 1
    for array, found in zip(arrays[:3] + arrays[4:], placed[:3] + placed[4:], strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype
        assert found.ctypes.data % LINE == 0


def test_what_is_not_used_any_more_is_given_back() -> None:
    """With the last array in it, though the memory may still be there for others."""
    memory = WeightMemory()
    first = memory.copy(np.ones(64 << 20, np.uint8))
    whole = weakref.ref(first.base)
    memory.copy(np.ones(64 << 20, np.uint8))
    assert whole() is not None
    del first
    gc.collect()
    assert whole() is None


def test_small_pages_do_where_there_are_no_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)
    assert WeightMemory().copy(np.arange(9)).tolist() == list(range(9))
