"""What the tests of drafters on MLX take for granted about a GPU."""

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest

from protocol.decoding.sampler import has_filter
from protocol.messages import Sampling
from services.drafter.backends import growth, mlx_tree
from services.mlx.loader import compute_unit
from services.sampling import candidates
from services.sampling.candidates import Top
from tests.services.drafter.backends import test_mlx


@pytest.fixture
def all_candidates() -> Iterator[None]:
    """Every token of the head is a candidate under noise, as it is for choices on the device; but
    filters look at the best ones there, too."""
    perturb = candidates.perturb

    def perturb_few(top: Top, positions: Sequence[int], sampling: Sampling) -> Top:
        few = test_mlx.FILTERED if has_filter(sampling) else None
        return perturb(Top(top.ids[:, :few], top.logits[:, :few], top.totals), positions, sampling)

    with (
        patch.object(test_mlx, "CANDIDATES", test_mlx.VOCABULARY),
        patch.object(mlx_tree, "SAMPLED_WIDTH", test_mlx.VOCABULARY),
        patch.object(candidates, "perturb", perturb_few),
        patch.object(growth, "perturb", perturb_few),
        patch("services.drafter.backends.head.blocks._SAMPLED_WIDTH", test_mlx.VOCABULARY),
    ):
        yield


@pytest.fixture(autouse=True)
def candidates_of_this_device(request: pytest.FixtureRequest) -> None:
    """On a GPU that is so in every test."""
    if compute_unit() != "cpu":
        request.getfixturevalue("all_candidates")
