"""MIL operations in numpy: only those that our packages contain.

Semantics: the iOS 18 opset of coremltools. An operation is a function of its inputs by name,
`OpInputs`, where a missing optional input is None.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import ModelError

Array = npt.NDArray[Any]


class OpInputs:
    """The inputs of one operation; missing ones read as None."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        return self.given.get(name)


def _axes(i: OpInputs) -> tuple[int, ...]:
    return tuple(int(axis) for axis in i.axes)


def _window(i: OpInputs, x: Array) -> tuple[slice, ...]:
    """Return the slices that begin, end, stride and the masks describe."""
    none = [False] * x.ndim
    if i.squeeze_mask is not None and any(i.squeeze_mask):
        raise ModelError("the reference runtime knows no squeeze_mask")
    begin_mask = none if i.begin_mask is None else i.begin_mask
    end_mask = none if i.end_mask is None else i.end_mask
    strides = [1] * x.ndim if i.stride is None else i.stride
    return tuple(
        slice(None if no_begin else int(b), None if no_end else int(e), int(s))
        for b, e, s, no_begin, no_end in zip(
            i.begin, i.end, strides, begin_mask, end_mask, strict=True
        )
    )


def _slice_update(i: OpInputs) -> Array:
    window = _window(i, i.x)
    if i.x[window].shape != i.update.shape:
        raise ModelError(
            f"slice_update writes {i.update.shape} to a window of {i.x[window].shape}: out of range"
        )
    updated: Array = i.x.copy()
    updated[window] = i.update
    return updated


def _conv(i: OpInputs) -> Array:
    rows, columns = i.weight.shape[:2]
    if i.weight.shape[2:] != (1, 1) or int(i.groups) != 1 or any(s != 1 for s in i.strides):
        raise ModelError("the reference runtime knows 1x1 convolutions only")
    batch, _, height, width = i.x.shape
    flat = i.x.reshape(batch, columns, height * width)
    y: Array = np.matmul(i.weight.reshape(rows, columns), flat)
    if i.bias is not None:
        y = y + i.bias[:, None]
    return y.reshape(batch, rows, height, width)


def _matmul(i: OpInputs) -> Array:
    x = np.swapaxes(i.x, -1, -2) if i.transpose_x else i.x
    y = np.swapaxes(i.y, -1, -2) if i.transpose_y else i.y
    product: Array = np.matmul(x, y)
    return product


def _softmax(i: OpInputs) -> Array:
    axis = int(i.axis)
    powers = np.exp(i.x - i.x.max(axis, keepdims=True))
    weights: Array = powers / powers.sum(axis, keepdims=True)
    return weights


def _gelu(i: OpInputs) -> Array:
    if i.mode != "TANH_APPROXIMATION":
        raise ModelError("the reference runtime knows gelu by its approximation with tanh only")
    inner = np.float32((2 / np.pi) ** 0.5) * (i.x + np.float32(0.044715) * i.x**3)
    result: Array = np.float32(0.5) * i.x * (1 + np.tanh(inner))
    return result


def _topk(i: OpInputs) -> tuple[Array, Array]:
    """Return the k largest in descending order, the lower index first among equals."""
    count, axis = int(i.k), int(i.axis)
    if i.ascending:
        raise ModelError("the reference runtime knows topk of the largest only")
    rows = np.ascontiguousarray(np.moveaxis(i.x, axis, -1))
    # Values and indices as one number: no ties, so a partition is enough.
    bits = (rows + np.float32(0)).view(np.int32).astype(np.int64)
    rising = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    keys = (rising << 32) - np.arange(rows.shape[-1])
    order = np.argpartition(-keys, count - 1, axis=-1)[..., :count]
    order = np.take_along_axis(
        order, np.argsort(-np.take_along_axis(keys, order, -1), axis=-1), axis=-1
    )
    values = np.take_along_axis(rows, order, axis=-1)
    return np.moveaxis(values, -1, axis), np.moveaxis(order, -1, axis).astype(np.int32)


def _split(i: OpInputs) -> tuple[Array, ...]:
    if i.num_splits is not None:
        return tuple(np.split(i.x, int(i.num_splits), int(i.axis)))
    return tuple(np.split(i.x, np.cumsum(i.split_sizes)[:-1], int(i.axis)))


def _reshape(i: OpInputs) -> Array:
    shape = [i.x.shape[axis] if size == 0 else int(size) for axis, size in enumerate(i.shape)]
    reshaped: Array = i.x.reshape(shape)
    return reshaped


def _palette(i: OpInputs) -> Array:
    """Look up indices [rows, columns, 1, 1] in palettes [groups, 1, 1, 1, 2**bits, 1]."""
    groups = i.lut.shape[0]
    if any(size != 1 for size in (*i.lut.shape[1:4], i.lut.shape[5])):
        raise ModelError("the reference runtime knows palettes by output rows only")
    palettes = i.lut.reshape(groups, -1)
    group = np.arange(len(i.indices)) // (len(i.indices) // groups)
    dense: Array = palettes[group[:, None, None, None], i.indices]
    return dense


def _shift_scale(i: OpInputs) -> Array:
    if i.offset is not None or i.scale.shape[1:] != (1, 1, 1):
        raise ModelError("the reference runtime knows one scale per row and no offset")
    dense: Array = i.data.astype(np.float32) * i.scale
    return dense


def _reduce(function: Callable[..., Array]) -> Callable[[OpInputs], Array]:
    return lambda i: function(i.x, axis=_axes(i), keepdims=bool(i.keep_dims))


_CASTS = {"fp16": np.float32, "fp32": np.float32, "int32": np.int32, "uint16": np.uint16}

CONSTANT_OPS: dict[str, Callable[[OpInputs], Array]] = {
    "constexpr_lut_to_dense": _palette,
    "constexpr_blockwise_shift_scale": _shift_scale,
}
"""Executed once, when a function is loaded."""

MOVES = frozenset({
    "concat", "identity", "reshape", "slice_by_index", "slice_update", "split", "transpose",
})  # fmt: skip
"""Their results are elements of their inputs, so they are rounded already."""

OPS: dict[str, Callable[[OpInputs], Array | tuple[Array, ...]]] = {
    "abs": lambda i: np.abs(i.x),
    "add": lambda i: i.x + i.y,
    "cast": lambda i: i.x.astype(_CASTS[i.dtype]),
    "concat": lambda i: np.concatenate(i.values, int(i.axis)),
    "conv": _conv,
    "exp": lambda i: np.exp(i.x),
    "gelu": _gelu,
    "identity": lambda i: i.x,
    "matmul": _matmul,
    "maximum": lambda i: np.maximum(i.x, i.y),
    "mul": lambda i: i.x * i.y,
    "real_div": lambda i: i.x / i.y,
    "reduce_max": _reduce(np.max),
    "reduce_mean": _reduce(np.mean),
    "reduce_sum": _reduce(np.sum),
    "reshape": _reshape,
    "rsqrt": lambda i: 1 / np.sqrt(i.x + np.float32(i.epsilon or 0)),
    "silu": lambda i: i.x / (1 + np.exp(-i.x)),
    "slice_by_index": lambda i: i.x[_window(i, i.x)],
    "slice_update": _slice_update,
    "softmax": _softmax,
    "split": _split,
    "sub": lambda i: i.x - i.y,
    "topk": _topk,
    "transpose": lambda i: np.transpose(i.x, [int(axis) for axis in i.perm]),
}
