"""What the tests of the kernels for few rows have in common."""

from collections.abc import Iterator

import pytest

from services.mlx import blas


@pytest.fixture(params=[0, 2], ids=["alone", "helped"])
def helpers(request: pytest.FixtureRequest) -> Iterator[int]:
    """Without and with threads that share the work, on whatever core there is."""
    assert blas.use_spare_cores([0] * request.param) == request.param
    yield request.param
    blas.use_spare_cores(())
