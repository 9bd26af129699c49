"""Number of layers for each rank of a pipeline, from measurements on the ranks."""

from collections.abc import Sequence
from typing import NamedTuple

from protocol.errors import ModelError

_FOR_WEIGHTS = 0.75
"""Share of the free memory for weights; the rest is for keys, values and passes."""
_ALIKE = 1.25
"""Ranks whose speeds differ by less get layers by memory alone."""


class Strength(NamedTuple):
    """Memory and speed of one rank."""

    free_bytes: int
    read_bytes_s: float


class LayerSizes(NamedTuple):
    """Sizes of a model's weights."""

    layers: int
    layer_bytes: int
    rest_bytes: int
    """Bytes that every rank holds: embeddings, norms, head."""


def propose_split(model: LayerSizes, ranks: Sequence[Strength]) -> list[int]:
    """Return the layers per rank, at least one each.

    A token passes through the ranks one after the other, so their times add up, and the fastest get
    as many layers as fit. If the ranks are equally fast, all keep the same share of their memory
    free for the keys and values of their own layers.

    Raises:
        ModelError: together they have no room for the model.
    """
    room = [
        int(max(0.0, _FOR_WEIGHTS * rank.free_bytes - model.rest_bytes) / model.layer_bytes)
        for rank in ranks
    ]
    if min(room) < 1 or sum(room) < model.layers or model.layers < len(ranks):
        raise ModelError(
            f"the ranks have room for {', '.join(map(str, room))} layers, "
            f"and the model has {model.layers}"
        )
    speeds = [rank.read_bytes_s for rank in ranks]
    alike = max(speeds) < _ALIKE * min(speeds)
    split = [1] * len(ranks)
    for _ in range(model.layers - len(ranks)):
        open_ranks = [rank for rank in range(len(ranks)) if split[rank] < room[rank]]
        by_share = {rank: room[rank] / (split[rank] + 1) for rank in open_ranks}
        split[max(open_ranks, key=by_share.__getitem__ if alike else speeds.__getitem__)] += 1
    return split
