"""Check that arrays read from a file have the shapes in which a model's states are dumped.

A state of another shape would be noticed too late, in a pass that fails or broadcasts. The model is
therefore asked for the shapes of two short states, and the arrays must agree with them. An axis in
which the two differ grows with the tokens, as does the row axis of slots and windows.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from services.kv.state import SequenceState

_SAMPLES = (2, 23)
"""The number of tokens of the first sample, and how many more the second has.

It is not a multiple of any number of rows that a layer might collect.
"""
_ROWS = 2
"""The row axis of slots and windows, [1, heads, rows, size], which comes in buckets."""
_GROWING = ("windows", "keys", "values")
"""Parts of a checkpoint whose arrays have rows."""

Dump = Mapping[str, mx.array]


def sample_dumps(model: Any, make_state: Callable[[], SequenceState]) -> list[Dump]:
    """Dump two states of the model without computing anything."""
    state, dumps = make_state(), list[Dump]()
    for count in _SAMPLES:
        state.append(count, whole=True)
        model(mx.ones((1, count), mx.int32), cache=state.caches)
        state.commit(state.length)
        dumps.append(state.dump(state.length))
    return dumps


def check_dump(found: Dump, samples: list[Dump]) -> None:
    """Compare a dump with two samples from the model.

    Raises:
        ValueError: it does not belong to this model, and why.
        KeyError: an array of a checkpoint is missing.
    """
    one, other = samples
    plain = [name for name in found if not name.startswith("points.")]
    _compare_names("it", plain, [name for name in one if not name.startswith("points.")])
    for name in plain:
        if name != "points":
            _compare(name, found[name], one[name], other[name], rows=True)
    if "points" in found:
        [*_, sample], [*_, later] = _read_points(one), _read_points(other)
        for number, point in enumerate(_read_points(found)):
            _compare(f"checkpoint {number}", point, sample, later, rows=False)


def _read_points(dump: Dump) -> list[Any]:
    """Return the checkpoints with arrays in place of their numbers."""
    text: Any = np.array(dump["points"])
    points: list[Any] = _join(json.loads(text.tobytes()), dump)
    return points


def _join(value: Any, dump: Dump) -> Any:
    if isinstance(value, list):
        return [_join(item, dump) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"array"}:
            return dump[f"points.{value['array']}"]
        return {key: _join(item, dump) for key, item in value.items()}
    return value


def _compare(what: str, found: Any, one: Any, other: Any, *, rows: bool) -> None:
    """Compare with the samples in everything but the number of tokens; `rows`: see `_ROWS`."""
    if one is None or other is None:
        return  # present only in some states
    if type(found) is not type(one):
        raise ValueError(f"{what} is a {type(found).__name__}, not a {type(one).__name__}")
    if isinstance(one, mx.array):
        _compare_arrays(what, found, one, other, rows=rows)
    if isinstance(one, dict):
        _compare_names(what, found, one)
        for key in one:
            if found[key] is not None:
                grows = rows or key in _GROWING
                _compare(f"{what}, {key}", found[key], one[key], other[key], rows=grows)
    if isinstance(one, list):
        _compare_names(what, range(len(found)), range(len(one)))
        for index, parts in enumerate(zip(found, one, other, strict=True)):
            _compare(f"{what} {index}", *parts, rows=rows)


def _compare_names(what: str, found: Iterable[Any], expected: Iterable[Any]) -> None:
    if sorted(found) != sorted(expected):
        raise ValueError(f"{what} holds {list(found)}, not {list(expected)}")


def _compare_arrays(
    what: str, found: mx.array, one: mx.array, other: mx.array, *, rows: bool
) -> None:
    shape, expected = list(found.shape), list(one.shape)
    if len(shape) == len(expected):
        for axis, size in enumerate(other.shape):
            if size != expected[axis] or (rows and axis == _ROWS):
                expected[axis] = shape[axis]
    if shape != expected:
        raise ValueError(f"{what} has the shape {found.shape}, not {one.shape}")
    if found.dtype != one.dtype:
        raise ValueError(f"{what} is in {found.dtype}, not {one.dtype}")
