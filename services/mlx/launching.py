"""Giving the device work without waiting for it, and passes in pieces.

MLX hands a large pass over in several graphs, so that a GPU begins before the host has built the
last layer. Where it has been told to make one graph of all it is given at once, the pieces are made
here. A layer's keys need the layers before it: computing those of a few is a piece.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

FIRST_LAYERS = 3
"""Whose launches are handed over first where the GPU waits for them: so many that it is still at
them when the next ones come."""
_NEXT_LAYERS = 9
"""In each of the pieces behind them: about what MLX by itself hands over at once."""
_FEW_LAYERS = 4
"""Of a pass of many tokens, in each piece."""


def launch(*arrays: Any) -> None:
    """Have the device compute these arrays, or nestings of them."""
    start: Any = mx.async_eval
    start(*arrays)


def launch_first(milestones: Sequence[mx.array]) -> None:
    """Have the device begin with the first layers of a pass.

    Args:
        milestones: see `KVStore.milestones`; lazy.
    """
    launch(list(milestones[: FIRST_LAYERS + 1]))


def launch_in_pieces(milestones: Sequence[mx.array]) -> None:
    """The same, and then some layers at a time; the last ones come with the pass's result."""
    launch_first(milestones)
    for at in range(FIRST_LAYERS + 1, len(milestones) - _NEXT_LAYERS, _NEXT_LAYERS):
        launch(list(milestones[at : at + _NEXT_LAYERS]))


def compute_in_pieces(milestones: Sequence[mx.array]) -> None:
    """Compute a pass a few layers at a time, so that what is in between does not all stand at once.

    Args:
        milestones: see `launch_first`.
    """
    before: list[mx.array] = []
    for at in range(0, len(milestones), _FEW_LAYERS):
        piece = list(milestones[at : at + _FEW_LAYERS])
        launch(piece)
        # The device has this one while the host builds the next.
        mx.eval(before)
        before = piece
