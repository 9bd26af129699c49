"""The best few tokens of each row of a drafter's logits, and the draft tokens among them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.decoding.rejection import drafter_distribution, draw_draft_token, to_message
from protocol.decoding.sampler import Floats, Ids, rank_candidates
from protocol.decoding.sampling_params import uses_rejection
from protocol.errors import RuntimeFailure
from protocol.messages import Sampling
from services.drafter.backends.base import DraftedToken, RoundOptions


class Top(NamedTuple):
    """The best candidates after some tokens, in falling order of logit."""

    ids: Ids
    """[rows, width] ids in the target's vocabulary."""
    logits: Floats
    """[rows, width]."""
    totals: Floats
    """[rows] log-sum-exp of the whole head."""

    def only(self, row: int) -> "Top":
        """One of the rows."""
        rows = slice(row, row + 1)
        return Top(self.ids[rows], self.logits[rows], self.totals[rows])

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
    if np.isnan(peaks).any():
        raise RuntimeFailure(
            "the drafter's logits are not numbers (NaN); its weights or kernels are broken"
        )
    totals = peaks + np.log(np.exp(rows - peaks[:, None]).sum(axis=-1))
    return Top(ids, np.take_along_axis(rows, columns, axis=-1), totals)


def process_candidates(
    processor: LogitsProcessor | None, tokens: Sequence[int], tops: list[Top], vocabulary: int
) -> list[Top]:
    """Move a processor along tokens; the candidates after each of them, shaped, in order again.

    A head that reports its best tokens only has no others to offer: what a bias would lift
    from below them stays out, and where a grammar allows none of them they are left as they
    are. Either costs accepted drafts.

    Args:
        processor: after the tokens before these; None changes nothing.
        tokens: the next tokens.
        tops: the candidates after each of them, one row each; none if they were not asked for.
        vocabulary: how many tokens there are.
    """
    if processor is None:
        return tops
    found = []
    for index, token in enumerate(tokens):
        processor.extend([token])
        if tops:
            found.append(_process_row(processor, tops[index], vocabulary))
    return found


def _process_row(processor: LogitsProcessor, top: Top, vocabulary: int) -> Top:
    ids, given = top.ids[0], top.logits[0]
    row = np.full(vocabulary, -np.inf, np.float32)
    row[ids] = given
    logits = processor.process(row)[ids]
    if not np.isfinite(logits).any():
        return top
    order = np.argsort(-logits, kind="stable")
    # What the head did not report keeps its share of the law.
    rest = np.exp(np.float64(top.totals[0])) - np.exp(given.astype(np.float64)).sum()
    total = np.log(max(rest, 0.0) + np.exp(logits.astype(np.float64)).sum())
    return Top(ids[order][None], logits[order][None], np.array([total], np.float32))


def best_bonuses(top: Top, position: int, sampling: Sampling) -> Ids:
    """The candidates for a bonus token, best first; `top` has one row.

    Under the rejection rule its noise cannot be known, so the best are the likeliest.
    What a grammar forbids is no candidate.
    """
    possible = np.isfinite(top.logits[0])
    ids, logits = top.ids[:, possible], top.logits[:, possible]
    if uses_rejection(sampling):
        best: Ids = ids[0]
    else:
        best = rank_candidates(ids, logits, [position], sampling)[0]
    return best


def draft_tokens(
    top: Top, positions: Sequence[int], sampling: Sampling, turn: RoundOptions
) -> list[DraftedToken]:
    """The draft token after each row: the target's guessed, or one drawn from the draft's law.

    Args:
        top: the candidates.
        positions: [rows] the position that the draft token will have, among the tokens that
            the backend was given.
        sampling: the drafter's (`sampling_params.drafter_sampling`).
        turn: the round that drafts, for the draw.
    """
    positions = [position + turn.shift for position in positions]
    if not uses_rejection(sampling):
        tokens = rank_candidates(top.ids, top.logits, positions, sampling)[:, 0].tolist()
        return [DraftedToken(token, top.confidence(row, token)) for row, token in enumerate(tokens)]
    found = []
    for ids, logits, position in zip(top.ids, top.logits, positions, strict=True):
        q = drafter_distribution(ids, logits, sampling, turn.held_back)
        token = draw_draft_token(q, position, sampling, turn.number)
        found.append(DraftedToken(token, float(q.probabilities.max()), to_message(q)))
    return found
