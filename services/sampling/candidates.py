"""Top candidates of each row of a drafter's logits, and their order under sampling noise."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.decoding.sampler import Floats, Ids, score_candidates
from protocol.decoding.sampling_params import is_greedy, uses_rejection
from protocol.errors import NotNumbers
from protocol.messages import Sampling
from services.kernels.cpu.best import find_best

SAMPLED_WIDTH = 64
"""Candidates per row when sampling with noise: the best by logit are rarely the best by score.

Under the rejection rule, the tokens of the distribution that a draft token is drawn from.
"""

NOT_NUMBERS = "the drafter's logits are not numbers (NaN); its weights or kernels are broken"


class Top(NamedTuple):
    """The best candidates after some tokens, in descending order of logit.

    The logits are the model's, or include the noise of the token to be chosen (`perturb`).
    """

    ids: Ids
    """[rows, width] ids in the target's vocabulary."""
    logits: Floats
    """[rows, width]."""
    totals: Floats
    """[rows] log-sum-exp over the whole head."""

    def only(self, row: int) -> "Top":
        """Return one of the rows."""
        rows = slice(row, row + 1)
        return Top(self.ids[rows], self.logits[rows], self.totals[rows])

    def confidences(self, row: int, count: int) -> list[float]:
        """Return the drafter's own probabilities of the first `count` candidates."""
        probabilities: list[float] = np.exp(self.logits[row, :count] - self.totals[row]).tolist()
        return probabilities


def best_of(rows: Floats, width: int, head_ids: Ids | None) -> Top:
    """Return the `width` best candidates of each row of [rows, head] logits.

    Args:
        rows: logits; column i is the token `head_ids[i]`, or i without `head_ids`.
        width: number of candidates; fewer if the head is smaller.
        head_ids: token ids of a trimmed head's columns.
    """
    width = min(width, rows.shape[-1])
    best = find_best(rows, width)
    if best is not None:
        check_shares(best.totals)
        ids = best.columns.astype(np.int64)
        return Top(ids if head_ids is None else head_ids[ids], best.values, best.totals)
    if width == 1:
        columns = np.argmax(rows, axis=-1)[:, None]
    else:
        columns = np.argpartition(-rows, width - 1, axis=-1)[:, :width]
        values = np.take_along_axis(rows, columns, axis=-1)
        columns = np.take_along_axis(columns, np.argsort(-values, axis=-1), axis=-1)
    ids = columns if head_ids is None else head_ids[columns]
    peaks = rows.max(axis=-1)
    check_shares(peaks)
    totals = peaks + np.log(np.exp(rows - peaks[:, None]).sum(axis=-1))
    return Top(ids, np.take_along_axis(rows, columns, axis=-1), totals)


def check_shares(shares: npt.ArrayLike) -> None:
    """Raise NotNumbers if a share that was computed from a row of logits is NaN."""
    if np.isnan(shares).any():
        raise NotNumbers(NOT_NUMBERS)


def process_candidates(
    processor: LogitsProcessor | None, tokens: Sequence[int], tops: list[Top], vocabulary: int
) -> list[Top]:
    """Advance a processor along tokens; return the processed candidates after each, sorted again.

    A head that reports only its best tokens has no others to offer: tokens that a bias would lift
    into them are missed, and where a grammar allows none of them they are left unchanged. Both only
    cost accepted drafts.

    Args:
        processor: state after the preceding tokens; None changes nothing.
        tokens: the next tokens.
        tops: the candidates after each of them, one row each; empty if not needed.
        vocabulary: number of tokens.
    """
    if processor is None:
        return tops
    processed = []
    for index, token in enumerate(tokens):
        processor.extend([token])
        if tops:
            processed.append(_process_row(processor, tops[index], vocabulary))
    return processed


def _process_row(processor: LogitsProcessor, top: Top, vocabulary: int) -> Top:
    ids, given = top.ids[0], top.logits[0]
    row = np.full(vocabulary, -np.inf, np.float32)
    row[ids] = given
    logits = processor.process(row)[ids]
    if not np.isfinite(logits).any():
        return top
    order = np.argsort(-logits, kind="stable")
    # The mass that the head did not report is kept.
    rest = np.exp(np.float64(top.totals[0])) - np.exp(given.astype(np.float64)).sum()
    total = np.log(max(rest, 0.0) + np.exp(logits.astype(np.float64)).sum())
    return Top(ids[order][None], logits[order][None], np.array([total], np.float32))


def perturb(top: Top, positions: Sequence[int], sampling: Sampling) -> Top:
    """Return the candidates under the target's sampling noise, the most probable choice first.

    The target's choice is the argmax of its logits + T g, and g is known. So the drafter's best
    guess is the argmax of its own logits + T g, and the runners-up follow in that order. The two
    models' logits differ by as much at any T, so the distribution of the target's choice is
    softmax(logits + T g), which at T = 0 is the drafter's own. The drafter's plain probabilities at
    T > 0 say how often a token is drawn, not how often both models draw the same one.

    Tokens outside the candidates keep their mass, as if their noise were zero. Under the rejection
    rule the noise cannot be known: nothing is changed.

    Args:
        top: the model's candidates.
        positions: [rows] the positions that the chosen tokens will have.
        sampling: the drafter's.
    """
    if is_greedy(sampling) or uses_rejection(sampling):
        return top
    scores = score_candidates(top.ids, top.logits, positions, sampling)
    order = np.argsort(-scores, axis=-1, kind="stable")
    ids = np.take_along_axis(top.ids, order, axis=-1)
    logits = np.take_along_axis(scores, order, axis=-1) * np.float32(sampling.temperature)
    # Subtract the maximum so that no exponential overflows.
    peaks = np.maximum(logits[:, 0], top.totals).astype(np.float64)[:, None]
    rest = np.exp(top.totals[:, None] - peaks) - _sum_exp(top.logits - peaks)
    totals = peaks + np.log(np.maximum(rest, 0.0) + _sum_exp(logits - peaks))
    return Top(ids, logits, totals[:, 0].astype(np.float32))


def _sum_exp(exponents: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Return the row sums of the exponentials, [rows, 1]."""
    sums: npt.NDArray[np.float64] = np.exp(exponents.astype(np.float64)).sum(-1, keepdims=True)
    return sums


def rank_bonuses(top: Top, position: int, sampling: Sampling) -> Top:
    """Return the candidates for a bonus token, best first; `top` has one row.

    Under the rejection rule the noise cannot be known, so candidates are ranked by probability.
    Tokens that a grammar forbids are excluded.
    """
    possible = np.isfinite(top.logits[0])
    allowed = Top(top.ids[:, possible], top.logits[:, possible], top.totals)
    return perturb(allowed, [position], sampling)


def best_bonuses(top: Top, position: int, sampling: Sampling) -> Ids:
    """Return the ids of `rank_bonuses`."""
    best: Ids = rank_bonuses(top, position, sampling).ids[0]
    return best
