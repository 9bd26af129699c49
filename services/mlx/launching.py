"""Launch work on the device without waiting for it, and split passes into pieces.

MLX submits a large pass in several graphs, so that a GPU begins before the host has built the last
layer. Where it has been configured to build one graph at a time, the pieces are made here. A
layer's keys need the layers before it: evaluating those of a few layers makes a piece.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

FIRST_LAYERS = 3
"""Layers launched first where the GPU is idle: enough to keep it busy until the next ones come."""
_NEXT_LAYERS = 9
"""Layers in each later piece: about what MLX submits at once by default."""
_FEW_LAYERS = 4
"""Layers per piece of a pass of many tokens."""


def launch(*arrays: Any) -> None:
    """Start computing these arrays, or nestings of them."""
    start: Any = mx.async_eval
    start(*arrays)


def launch_first(milestones: Sequence[mx.array]) -> None:
    """Start the first layers of a pass, given its `KVStore.milestones`, which are lazy."""
    launch(list(milestones[: FIRST_LAYERS + 1]))


def launch_in_pieces(milestones: Sequence[mx.array]) -> None:
    """Start the first layers, then more in pieces; the last ones come with the pass's result."""
    launch_first(milestones)
    for at in range(FIRST_LAYERS + 1, len(milestones) - _NEXT_LAYERS, _NEXT_LAYERS):
        launch(list(milestones[at : at + _NEXT_LAYERS]))


def compute_in_pieces(milestones: Sequence[mx.array]) -> None:
    """Compute a pass, given its `KVStore.milestones`, a few layers at a time to save memory."""
    before: list[mx.array] = []
    for at in range(0, len(milestones), _FEW_LAYERS):
        piece = list(milestones[at : at + _FEW_LAYERS])
        launch(piece)
        # The device computes this one while the host builds the next.
        mx.eval(before)
        before = piece
