"""The best few tokens of each row of a drafter's logits, which is all that leaves the device."""

from typing import NamedTuple

import numpy as np

from protocol.law import Floats, Ids


class Top(NamedTuple):
    """The best candidates after some tokens, in falling order of logit."""

    ids: Ids
    """[rows, width] ids in the target's vocabulary."""
    logits: Floats
    """[rows, width]."""
    totals: Floats
    """[rows] log-sum-exp of the whole head."""

    def confidence(self, row: int, token: int) -> float:
        """The drafter's own probability of one of the candidates."""
        column = int(np.flatnonzero(self.ids[row] == token)[0])
        return float(np.exp(self.logits[row, column] - self.totals[row]))


def best_of(rows: Floats, width: int, head_ids: Ids | None) -> Top:
    """The `width` best candidates of each row of [rows, head] logits.

    Args:
        rows: logits; column i is the token `head_ids[i]`, or i without them.
        width: candidates wanted; fewer if the head is smaller.
        head_ids: what the columns of a trimmed head stand for.
    """
    width = min(width, rows.shape[-1])
    if width == 1:
        columns = np.argmax(rows, axis=-1)[:, None]
    else:
        columns = np.argpartition(-rows, width - 1, axis=-1)[:, :width]
        values = np.take_along_axis(rows, columns, axis=-1)
        columns = np.take_along_axis(columns, np.argsort(-values, axis=-1), axis=-1)
    ids = columns if head_ids is None else head_ids[columns]
    peaks = rows.max(axis=-1)
    totals = peaks + np.log(np.exp(rows - peaks[:, None]).sum(axis=-1))
    return Top(ids, np.take_along_axis(rows, columns, axis=-1), totals)
