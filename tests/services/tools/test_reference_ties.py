"""When a difference between two modes may be called a rounding tie."""

import mlx.core as mx
import pytest

from protocol.jobs.reference import LARGEST_TIE, MarginResult
from services.tools.reference import _spacing


@pytest.mark.parametrize(
    ("dtype", "size", "spacing"),
    [
        (mx.float16, 15.9, 2.0**-7),
        (mx.float16, 16.0, 2.0**-6),
        (mx.bfloat16, 9.0, 2.0**-4),
        (mx.float32, 3.0, 2.0**-22),
        (mx.float16, 0.0, 0.0),
    ],
)
def test_spacing_is_that_of_the_format(dtype: mx.Dtype, size: float, spacing: float) -> None:
    """The next larger float of the format is one spacing away."""
    assert _spacing(size, mx.finfo(dtype).eps) == spacing
    if spacing:
        step = mx.array([size, size + spacing]).astype(dtype).astype(mx.float32)
        assert (step[1] - step[0]).item() == spacing


def test_ties_are_wider_in_half_precision_only() -> None:
    """Four steps of the format; float32 keeps its own limit."""
    assert MarginResult(LARGEST_TIE, 1e-7).is_tie
    assert not MarginResult(2 * LARGEST_TIE, 1e-7).is_tie
    assert MarginResult(0.03, 2.0**-7).is_tie
    assert not MarginResult(0.04, 2.0**-7).is_tie
    assert not MarginResult(float("inf"), 0.06).is_tie
