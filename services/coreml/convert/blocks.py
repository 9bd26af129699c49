"""The pieces of a decoder in MIL, laid out for the Neural Engine.

Activations are [1, channels, 1, tokens], every dense layer is a 1x1 convolution, everything
is float16 and of rank 4 at most.
"""

from typing import Any

import coremltools as ct
import numpy as np
import numpy.typing as npt
from coremltools.converters.mil import Builder, mil
from coremltools.converters.mil.mil import types as _types

from protocol.decoding.sampler import Floats
from services.coreml.convert.compression import Packed

# coremltools creates its operations at run time, so they have no types.
mb: Any = Builder
types: Any = _types
MilFunction: Any = mil.Function
MilProgram: Any = mil.Program
OPSET: Any = ct.target.iOS18
"""The first that has states; macOS 15."""

Var = Any
"""A value in a MIL program."""

_SMALLEST_PEAK = np.float16(2**-10)
_UINTS = {4: types.uint4, 6: types.uint6, 8: types.uint8}


def _column(values: npt.NDArray[Any]) -> Any:
    return values.astype(np.float16)[None, :, None, None]


def dense(x: Var, weight: Packed, bias: Floats | None, name: str) -> Var:
    """Build a linear layer."""
    late = weight.palettes.size > 0  # with palettes, rows are scaled by a multiplication afterwards
    early_bias = None if bias is None or late else bias.astype(np.float16)
    options = {} if early_bias is None else {"bias": early_bias}
    y = mb.conv(x=x, weight=_constant(weight, name), pad_type="valid", name=name, **options)
    if late:
        y = mb.mul(x=y, y=_column(weight.scales), name=f"{name}_scaled")
        if bias is not None:
            y = mb.add(x=y, y=_column(bias), name=f"{name}_biased")
    return y


def _constant(weight: Packed, name: str) -> Var:
    data: Any = np.ascontiguousarray(weight.data[:, :, None, None])
    name = f"{name}_weight"
    if weight.palettes.size:
        return mb.constexpr_lut_to_dense(
            indices=data.astype(types.nptype_from_builtin(_UINTS[weight.bits])),
            lut=np.ascontiguousarray(weight.palettes[:, None, None, None, :, None]),
            name=name,
        )
    if weight.scales.size:
        scale = np.ascontiguousarray(weight.scales[:, None, None, None])
        return mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name=name)
    return mb.const(val=data, name=name)


def rms_norm(x: Var, weight: Floats, eps: float, name: str) -> Var:
    """Build an RMSNorm over axis 1 that float16 cannot overflow.

    The residual stream of a small Llama reaches 25 000, whose square exceeds float16. Divided by
    its peak m first, with eps divided by m squared, the function is the same and no intermediate
    value exceeds 1 by much.
    """
    peak = mb.reduce_max(x=mb.abs(x=x), axes=[1], keep_dims=True)
    inverse = mb.real_div(x=np.float16(1.0), y=mb.maximum(x=peak, y=_SMALLEST_PEAK))
    x = mb.mul(x=x, y=inverse)
    floor = mb.mul(x=inverse, y=np.float16(eps**0.5))
    mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[1], keep_dims=True)
    total = mb.add(x=mean, y=mb.mul(x=floor, y=floor))
    x = mb.mul(x=x, y=mb.rsqrt(x=total, epsilon=np.float16(1e-7)))
    return mb.mul(x=x, y=_column(weight), name=name)


def rotate(x: Var, cos: Var, sin: Var) -> Var:
    """Build RoPE, half-split: [heads, head_dim, 1, tokens] -> the same."""
    a, b = mb.split(x=x, num_splits=2, axis=1)
    low = mb.sub(x=mb.mul(x=a, y=cos), y=mb.mul(x=b, y=sin))
    high = mb.add(x=mb.mul(x=b, y=cos), y=mb.mul(x=a, y=sin))
    return mb.concat(values=[low, high], axis=1)


def by_head(x: Var) -> Var:
    """Reshape [heads, head_dim, 1, tokens] to [1, heads, tokens, head_dim]."""
    return mb.transpose(x=x, perm=[2, 0, 3, 1])


def attend(queries: Var, keys: Var, values: Var, mask: Var) -> Var:
    """Attend from [1, kv_heads, group * tokens, head_dim]: one product for all query heads."""
    scores = mb.matmul(x=queries, y=keys, transpose_y=True)
    weights = mb.softmax(x=mb.add(x=scores, y=mask), axis=-1)
    return mb.matmul(x=weights, y=values)


def best_tokens(logits: Var, width: int, first: int) -> tuple[Var, Var, Var, Var]:
    """Return best values, their columns, the peak and the sum of exp(x - peak).

    Logits are [1, rows, 1, tokens]. `first` is the column of the head at which these rows start.
    The host takes the logarithm, in float32.
    """
    values, columns = mb.topk(x=logits, k=width, axis=1, sort=True)
    columns = mb.add(x=columns, y=np.int32(first))
    peak = mb.reduce_max(x=logits, axes=[1], keep_dims=True)
    total = mb.reduce_sum(x=mb.exp(x=mb.sub(x=logits, y=peak)), axes=[1], keep_dims=True)
    return values, columns, peak, total
