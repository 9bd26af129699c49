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

The latter is not a multiple of any number of rows that a layer might collect.
"""
_ROWS = 2
"""The row axis of slots and windows, [1, heads, rows, size]: its size is rounded to buckets."""
_GROWING = ("windows", "keys", "values")
"""Parts of a checkpoint whose arrays have rows."""

Dump = Mapping[str, mx.array]


def sample_dumps(model: Any, make_state: Callable[[], SequenceState]) -> list[Dump]:
    """Dump two states of the model; nothing is evaluated, since only shapes are compared."""
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
        ValueError: it does not belong to this model; the message says why.
        KeyError: an array of a checkpoint is missing.
    """
    short, long = samples
    plain = [name for name in found if not name.startswith("points.")]
    _compare_names("it", plain, [name for name in short if not name.startswith("points.")])
    for name in plain:
        if name != "points":
            _compare(name, found[name], short[name], long[name], rows=True)
    if "points" in found:
        [*_, short_point], [*_, long_point] = _read_points(short), _read_points(long)
        for number, point in enumerate(_read_points(found)):
            _compare(f"checkpoint {number}", point, short_point, long_point, rows=False)


def _read_points(dump: Dump) -> list[Any]:
    """Return the checkpoints, with each array in place of its index."""
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


def _compare(what: str, found: Any, short: Any, long: Any, *, rows: bool) -> None:
    """Compare with the samples in all but the number of tokens; `rows`: its axis is `_ROWS`."""
    if short is None or long is None:
        return  # present only in some states
    if type(found) is not type(short):
        raise ValueError(f"{what} is a {type(found).__name__}, not a {type(short).__name__}")
    if isinstance(short, mx.array):
        _compare_arrays(what, found, short, long, rows=rows)
    if isinstance(short, dict):
        _compare_names(what, found, short)
        for key in short:
            if found[key] is not None:
                grows = rows or key in _GROWING
                _compare(f"{what}, {key}", found[key], short[key], long[key], rows=grows)
    if isinstance(short, list):
        _compare_names(what, range(len(found)), range(len(short)))
        for index, parts in enumerate(zip(found, short, long, strict=True)):
            _compare(f"{what} {index}", *parts, rows=rows)


def _compare_names(what: str, found: Iterable[Any], expected: Iterable[Any]) -> None:
    if sorted(found) != sorted(expected):
        raise ValueError(f"{what} holds {list(found)}, not {list(expected)}")


def _compare_arrays(
    what: str, found: mx.array, short: mx.array, long: mx.array, *, rows: bool
) -> None:
    shape, expected = list(found.shape), list(short.shape)
    if len(shape) == len(expected):
        for axis, size in enumerate(long.shape):
            if size != expected[axis] or (rows and axis == _ROWS):
                expected[axis] = shape[axis]
    if shape != expected:
        raise ValueError(f"{what} has the shape {found.shape}, not {short.shape}")
    if found.dtype != short.dtype:
        raise ValueError(f"{what} is in {found.dtype}, not {short.dtype}")
