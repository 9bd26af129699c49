"""Copies of mlx-lm's own caches of any class: by reference, and as plain arrays.

MLX arrays are values: a second reference keeps the present contents and costs nothing until one of
them is written.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache

from protocol.errors import ModelError

Copy = dict[str, Any]
"""Attributes of a cache."""

_ARRAY = "array"
_PLAIN = (bool, int, float, str, type(None))


def copy_cache(cache: Any) -> Copy:
    """Copy the present contents of the cache.

    Raises:
        ModelError: it holds something that cannot be copied.
    """
    if type(cache) is ArraysCache:
        # Its arrays are replaced, never written in place.
        return vars(cache) | {"cache": [*cache.cache]}
    return {name: _copy(value, cache) for name, value in vars(cache).items()}


def restore_cache(cache: Any, copied: Copy) -> None:
    """Restore a copy into a cache of the same class."""
    if vars(cache).keys() != copied.keys():
        raise ValueError(f"this copy is not of a {type(cache).__name__}")
    if type(cache) is ArraysCache:
        cache.cache = [*copied["cache"]]
        cache.left_padding, cache.lengths = copied["left_padding"], copied["lengths"]
        return
    for name, value in copied.items():
        setattr(cache, name, _copy(value, cache))


def count_bytes(copied: Any) -> int:
    """Return the memory of the arrays in a copy."""
    if isinstance(copied, mx.array):
        return copied.nbytes
    if isinstance(copied, dict):
        return sum(map(count_bytes, copied.values()))
    return sum(map(count_bytes, copied)) if isinstance(copied, list | tuple) else 0


def _copy(value: Any, cache: Any) -> Any:
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, list):
        return [_copy(item, cache) for item in value]
    if isinstance(value, tuple):
        return tuple(_copy(item, cache) for item in value)
    if isinstance(value, dict):
        return {key: _copy(item, cache) for key, item in value.items()}
    if not isinstance(value, _PLAIN):
        raise ModelError(f"a layer's {type(cache).__name__} holds a {type(value).__name__}")
    return value


def split_arrays(value: Any, arrays: list[mx.array]) -> Any:
    """Move arrays into `arrays` and put their numbers in place, so that JSON can hold the rest."""
    if isinstance(value, mx.array):
        arrays.append(value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [split_arrays(item, arrays) for item in value]
    if isinstance(value, dict):
        return {key: split_arrays(item, arrays) for key, item in value.items()}
    return value


def join_arrays(value: Any, arrays: Mapping[int, mx.array]) -> Any:
    """Undo `split_arrays`; tuples come back as lists."""
    if isinstance(value, list):
        return [join_arrays(item, arrays) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: join_arrays(item, arrays) for key, item in value.items()}
    return value


def is_trimmable(cache: Any) -> bool:
    """Return True if the last rows (of the present chunk, for `ChunkedKVCache`) can be dropped."""
    return type(cache) in (KVCache, ChunkedKVCache)


def copy_position(cache: Any) -> Any:
    """Return what restores the cache to this point: its offset, or a copy."""
    return cache.offset if is_trimmable(cache) else copy_cache(cache)
