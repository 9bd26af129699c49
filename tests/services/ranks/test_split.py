"""Layers by what was measured on each rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ModelError
from services.ranks.split import LayerSizes, Strength, propose_split

GB = 10**9
MODEL = LayerSizes(layers=32, layer_bytes=GB, rest_bytes=2 * GB)


@pytest.mark.parametrize(
    ("ranks", "split"),
    [
        # Alike: by memory.
        ([Strength(32 * GB, 400e9), Strength(32 * GB, 410e9)], [16, 16]),
        ([Strength(64 * GB, 400e9), Strength(24 * GB, 410e9)], [24, 8]),
        # Twice as fast: as much as it has room for, whatever the other has.
        ([Strength(24 * GB, 800e9), Strength(128 * GB, 400e9)], [16, 16]),
        ([Strength(128 * GB, 400e9), Strength(128 * GB, 800e9)], [1, 31]),
        ([Strength(16 * GB, 9e9), Strength(24 * GB, 5e9), Strength(24 * GB, 3e9)], [10, 16, 6]),
    ],
)
def test_the_fastest_have_as_much_as_they_have_room_for(
    ranks: list[Strength], split: list[int]
) -> None:
    """And ranks that are alike the same share of their memory."""
    assert propose_split(MODEL, ranks) == split


def test_a_model_that_does_not_fit_is_refused() -> None:
    """With the room of each rank."""
    with pytest.raises(ModelError, match="room for 10, 10 layers, and the model has 32"):
        propose_split(MODEL, [Strength(16 * GB, 1.0), Strength(16 * GB, 1.0)])


@given(
    st.lists(
        st.builds(Strength, st.integers(4 * GB, 200 * GB), st.floats(1e9, 1e12)),
        min_size=2,
        max_size=5,
    )
)
def test_every_proposal_fits(ranks: list[Strength]) -> None:
    """All layers, one at least per rank, none beyond a rank's room."""
    try:
        split = propose_split(MODEL, ranks)
    except ModelError:
        room = [max(0, int((0.75 * r.free_bytes - 2 * GB) / GB)) for r in ranks]
        assert sum(room) < MODEL.layers or min(room) < 1
        return
    assert sum(split) == MODEL.layers
    for rank, layers in zip(ranks, split, strict=True):
        assert 1 <= layers <= (0.75 * rank.free_bytes - 2 * GB) / GB
