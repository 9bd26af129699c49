"""What the tests of drafters on MLX take for granted about a GPU."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from services.drafter.backends import mlx_tree
from services.mlx.loader import compute_unit
from tests.services.drafter.backends import test_mlx


@pytest.fixture
def all_candidates() -> Iterator[None]:
    """Every token of the head is a candidate under noise, as it is for choices on the device."""
    with (
        patch.object(test_mlx, "CANDIDATES", test_mlx.VOCABULARY),
        patch.object(mlx_tree, "SAMPLED_WIDTH", test_mlx.VOCABULARY),
        patch("services.sampling.candidates.SAMPLED_WIDTH", test_mlx.VOCABULARY),
        patch("services.drafter.backends.head.blocks._SAMPLED_WIDTH", test_mlx.VOCABULARY),
    ):
        yield


@pytest.fixture(autouse=True)
def candidates_of_this_device(request: pytest.FixtureRequest) -> None:
    """On a GPU that is so in every test."""
    if compute_unit() != "cpu":
        request.getfixturevalue("all_candidates")
