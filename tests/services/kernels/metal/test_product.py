"""The quantised product for Metal, its source run on the host: what MLX's product gives.

What only a GPU can show (that Metal's compiler takes it, and where a lane holds a matrix) is
tried when a model is loaded there.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from services.kernels.metal.product import Quantised, multiply, takes, weights_of
from tests.services.kernels.metal.host import HostMetal

_ROUNDING = {mx.float16: 2**-11, mx.bfloat16: 2**-8}
"""Half a step of the format, relative."""


def _weights(
    outputs: int, inputs: int, bits: int, group_size: int, dtype: mx.Dtype = mx.float16
) -> Quantised:
    dense = mx.random.normal((outputs, inputs), key=mx.random.key(bits + group_size))
    packed = mx.quantize(dense.astype(dtype), group_size=group_size, bits=bits)
    return Quantised(*packed, group_size, bits)


def _rows(count: int, inputs: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal((count, inputs), dtype, key=mx.random.key(9))


def _exact(x: mx.array, weights: Quantised) -> Any:
    """MLX's product of the same numbers in float32."""
    scales, biases = (a.astype(mx.float32) for a in (weights.scales, weights.biases))
    product = mx.quantized_matmul(
        x.astype(mx.float32), weights.weight, scales, biases,
        group_size=weights.group_size, bits=weights.bits,
    )  # fmt: skip
    return np.array(product)


def _assert_near(x: mx.array, weights: Quantised) -> None:
    found, exact = np.array(multiply(x, weights).astype(mx.float32)), _exact(x, weights)
    steps = _ROUNDING[x.dtype]
    np.testing.assert_allclose(found, exact, rtol=1.01 * steps, atol=1e-4)


def _bits(array: mx.array) -> Any:
    return np.array(array.view(mx.uint16))


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype"),
    [
        (4, 32, mx.float16),
        (4, 64, mx.bfloat16),
        (4, 128, mx.float16),
        (8, 32, mx.bfloat16),
        (8, 64, mx.float16),
        (8, 128, mx.bfloat16),
    ],
)
def test_is_mlx_product(host: HostMetal, bits: int, group_size: int, dtype: mx.Dtype) -> None:
    """To the last rounding, in one tile of rows and in two; the last block of outputs is half."""
    weights = _weights(24, 384, bits, group_size, dtype)
    for count in (1, 5, 11):
        _assert_near(_rows(count, 384, dtype), weights)
    assert len(host.launches) == 3


@pytest.mark.parametrize(("outputs", "inputs"), [(8, 1024), (2056, 64)])
def test_other_divisions_of_the_work(host: HostMetal, outputs: int, inputs: int) -> None:
    """Many groups for more simdgroups; many outputs in larger blocks."""
    _assert_near(_rows(3, inputs), _weights(outputs, inputs, 4, 32))


@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, 32)])
def test_a_row_has_the_same_bits_in_any_company(
    host: HostMetal, bits: int, group_size: int
) -> None:
    """Alone, among 2 to 16, and beside rows that are no numbers."""
    weights, rows = _weights(24, 384, bits, group_size), _rows(16, 384)
    together = _bits(multiply(rows, weights))
    for count in range(1, 16):
        np.testing.assert_array_equal(_bits(multiply(rows[:count], weights)), together[:count])
    alone = np.concatenate([_bits(multiply(row[None], weights)) for row in rows])
    np.testing.assert_array_equal(alone, together)
    odd = mx.array([i % 2 == 1 for i in range(16)])[:, None]
    found = multiply(mx.where(odd, mx.nan, rows), weights)
    np.testing.assert_array_equal(_bits(found)[::2], together[::2])
    assert mx.isnan(found[1::2]).all().item()


def test_rows_keep_their_shape(host: HostMetal) -> None:
    weights, rows = _weights(8, 64, 4, 64), _rows(6, 64)
    found = multiply(rows.reshape(1, 2, 3, 64), weights)
    assert found.shape == (1, 2, 3, 8)
    assert mx.array_equal(found.reshape(6, 8), multiply(rows, weights)).item()


def _layer(outputs: int = 64, dtype: mx.Dtype = mx.float16, **how: Any) -> Any:
    dense = nn.Linear(128, outputs, bias=False)
    dense.set_dtype(dtype)
    return nn.QuantizedLinear.from_linear(dense, **how)


def test_which_layers_it_serves() -> None:
    assert weights_of(_layer(group_size=64, bits=4)) is not None
    assert weights_of(_layer(group_size=32, bits=8, dtype=mx.bfloat16)) is not None
    refused = [
        _layer(group_size=64, bits=3),
        _layer(group_size=64, bits=4, dtype=mx.float32),
        _layer(group_size=64, bits=4, outputs=60),
        _layer(group_size=32, bits=4, mode="mxfp4"),
    ]
    assert [weights_of(layer) for layer in refused] == [None] * 4


def test_which_calls_it_serves() -> None:
    weights = _weights(8, 64, 4, 64)
    assert takes(_rows(1, 64), weights)
    assert takes(_rows(16, 64).reshape(2, 8, 64), weights)
    assert not takes(_rows(17, 64), weights)
    assert not takes(_rows(0, 64), weights)
    assert not takes(_rows(1, 64, mx.bfloat16), weights)
