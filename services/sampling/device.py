"""Token selection on the logits' device: only a few numbers per row leave the GPU.

`choose` returns exactly the tokens of `protocol.decoding.sampler.sample`. Noise and filters are
computed on the device in float32; where rounding could change the result (a rival within rounding
of the best score, a winner at the border of a filter), the row is decided on the host.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.decoding import sampler
from protocol.decoding.gumbel import gumbel, gumbel_from_bits, hash_with_keys
from protocol.decoding.sampler import Floats, Ids
from protocol.decoding.sampling_params import goes_beyond, is_greedy
from protocol.errors import NotNumbers
from protocol.messages import Sampling
from services.kernels.cuda.sampling.best import sort_best
from services.kernels.cuda.sampling.guess import (
    CANDIDATES,
    DRAWN,
    FILTERED,
    GREEDY,
)
from services.kernels.cuda.sampling.rules import read_noise
from services.kernels.register import kernels
from services.sampling import candidates
from services.sampling.candidates import Top

_FILTER_WIDTH = 1024
"""Tokens per row that the filters consider; a row that keeps more is decided on the host."""

APPLIED = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})
"""Fields of `Sampling` that MLX's operations apply here; the host decides rows with others."""

_CLOSE = 1e-5
"""Scores closer than this, relative to their magnitude, are compared on the host."""

_BORDER = 1e-4
"""Probabilities this close to a filter's border may be on either side of it."""

_DROPPED = 1e9
"""Subtracted from the logits of tokens that a drafter's filter drops."""

_UNDECIDED, _BROKEN = -1, -2
"""In place of a token: the host decides, or some logit of the row is NaN or infinite."""

_NOT_NUMBERS = (
    "the target's logits are not numbers (NaN or infinite); its weights or kernels are broken"
)


class _Candidates(NamedTuple):
    """Tokens that may be chosen: [rows, n] ids and logits, and which of them the filters keep."""

    ids: mx.array
    logits: mx.array
    sure: mx.array
    possible: mx.array


def choose(logits: mx.array, positions: Sequence[int], sampling: Sampling) -> list[int]:
    """Choose one token per row with `begin` and `finish`.

    Raises:
        NotNumbers: a logit is NaN.
    """
    return finish(begin(logits, positions, sampling), logits, positions, sampling)


def begin(logits: mx.array, positions: Sequence[int], sampling: Sampling) -> mx.array:
    """Choose one token per row, lazily; negative where `finish` has to decide.

    Args:
        logits: [rows, vocabulary], unnormalised, of any floating type.
        positions: [rows] the absolute position that each chosen token will have.
    """
    there = kernels().choose(logits, positions, sampling)
    if there is not None:
        return there
    too_wide = sampling.top_k >= min(_FILTER_WIDTH, logits.shape[-1])
    if goes_beyond(sampling, APPLIED) or (too_wide and not is_greedy(sampling)):
        tokens = mx.full(logits.shape[0], _UNDECIDED, mx.int32)
    elif is_greedy(sampling):
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    else:
        tokens = _draw(logits.astype(mx.float32), positions, sampling)
    broken = mx.isnan(logits) | mx.isposinf(logits)
    return mx.where(broken.any(axis=-1), _BROKEN, tokens)


def finish(
    begun: mx.array | npt.NDArray[np.int32],
    logits: mx.array,
    positions: Sequence[int],
    sampling: Sampling,
) -> list[int]:
    """Return the tokens on the host, deciding the ambiguous rows there.

    Args:
        begun: result of `begin` for the other arguments.

    Raises:
        NotNumbers: a logit is NaN.
    """
    tokens: Any = begun.tolist()
    if _BROKEN in tokens:
        raise NotNumbers(_NOT_NUMBERS)
    for row, token in enumerate(tokens):
        if token == _UNDECIDED:
            alone = np.array(logits[row : row + 1].astype(mx.float32))
            tokens[row] = sampler.sample(alone, [positions[row]], sampling)[0]
    return [int(token) for token in tokens]


def _draw(rows: mx.array, positions: Sequence[int], sampling: Sampling) -> mx.array:
    """Choose [rows] tokens, or `_UNDECIDED`."""
    kept = _filter(rows, sampling) if sampler.has_filter(sampling) else _keep_all(rows)
    scores = kept.logits / sampling.temperature
    scores = scores + gumbel(mx, sampling.seed, positions, kept.ids)
    scores = mx.where(kept.possible, scores, -mx.inf)
    best = mx.argmax(scores, axis=-1, keepdims=True)
    top = mx.take_along_axis(scores, best, axis=-1)
    rivals = (scores >= top - _CLOSE * (1.0 + mx.abs(top))).sum(axis=-1, keepdims=True)
    sure = mx.take_along_axis(kept.sure, best, axis=-1) & (rivals == 1)
    ids = mx.broadcast_to(kept.ids, scores.shape)
    token = mx.take_along_axis(ids, best, axis=-1).astype(mx.int32)
    return mx.where(sure, token, _UNDECIDED)[:, 0]


def check_finite(logits: mx.array) -> None:
    """Raise NotNumbers if a logit is NaN; waits until they are computed."""
    if bool(mx.isnan(logits).any()):
        raise NotNumbers(_NOT_NUMBERS)


def _keep_all(rows: mx.array) -> _Candidates:
    every = mx.ones(rows.shape, mx.bool_)
    return _Candidates(mx.arange(rows.shape[-1], dtype=mx.uint32)[None], rows, every, every)


def _filter(rows: mx.array, sampling: Sampling) -> _Candidates:
    """Return the best tokens, in descending order, and on which side of each border they are."""
    count = min(_FILTER_WIDTH, rows.shape[-1])
    order = mx.argsort(-rows, axis=-1)[:, :count]
    logits = mx.take_along_axis(rows, order, axis=-1)
    top = logits[:, :1]
    shares = mx.exp(logits - top) / mx.exp(rows - top).sum(axis=-1, keepdims=True)
    sure = possible = mx.ones(logits.shape, mx.bool_)
    if sampling.top_k:
        # Of equal logits at the border the smaller ids are kept.
        last, next_ = logits[:, sampling.top_k - 1, None], logits[:, sampling.top_k, None]
        sure, possible = sure & (logits > next_), possible & (logits >= last)
    if sampling.top_p < 1.0:
        before = mx.cumsum(shares, axis=-1) - shares
        sure &= before < sampling.top_p - _BORDER
        possible &= before < sampling.top_p + _BORDER
    if sampling.min_p > 0.0:
        least = sampling.min_p * shares[:, :1]
        sure &= shares >= least * (1.0 + _BORDER)
        possible &= shares >= least * (1.0 - _BORDER)
    if count < rows.shape[-1]:
        # Tokens beyond the width are not seen: a row that reaches it is ambiguous as a whole.
        sure &= ~possible[:, -1:]
    return _Candidates(order.astype(mx.uint32), logits, sure, possible)


def best_of(rows: mx.array | Floats, width: int, head_ids: Ids | None) -> Top:
    """Compute `candidates.best_of` for logits [rows, head] in numpy or on a GPU."""
    if isinstance(rows, np.ndarray):
        return candidates.best_of(rows, width, head_ids)
    width = min(width, rows.shape[-1])
    there = kernels().find_best(rows, width)
    # One array, since each needs its own transfer to the host; floats hold any column exactly.
    found = np.array(sort_best(rows, width) if there is None else there)
    count = found.shape[1] // 2
    candidates.check_shares(found[:, -1])
    places: Ids = found[:, :width].astype(np.int64)
    ids = places if head_ids is None else head_ids[places]
    return Top(ids, found[:, count : count + width], found[:, -1])


def guess(
    rows: mx.array, ids: mx.array, rules: mx.array, sampling: Sampling
) -> tuple[mx.array, mx.array]:
    """Return the most probable target choice after each row, on the device.

    It equals that of `candidates.perturb`, except that without filters every token of the head is
    a candidate: finding the best few would take longer than adding noise to all.

    Args:
        rows: [rows, head] logits.
        ids: [head] int32, the token id of each column.
        rules: [rows, WORDS] of the tokens to be chosen, see `write_rules`.
        sampling: what the rules were written for, apart from seed and temperature.

    Returns:
        [rows] int32, the tokens; and [2, rows] float32, which holds any id exactly: the same, and
            the confidence of each.
    """
    there = kernels().guess(rows, ids, rules, kind_of(sampling), _guess_on_host)
    return _guess_by_mlx(rows, ids, rules, sampling) if there is None else there


def _guess_on_host(
    logits: Floats, positions: Sequence[int], ids: Ids, sampling: Sampling
) -> tuple[Ids, Floats]:
    """Return the best token after each row, and its confidence."""
    # Without filters every token is a candidate.
    width = logits.shape[1] if kind_of(sampling) == DRAWN else CANDIDATES
    top = candidates.perturb(candidates.best_of(logits, width, ids), positions, sampling)
    return top.ids[:, 0], np.array([top.confidences(row, 1)[0] for row in range(len(logits))])


def kind_of(sampling: Sampling) -> int:
    """Return the kind of the rules of a sampling."""
    if is_greedy(sampling):
        return GREEDY
    return FILTERED if sampler.has_filter(sampling) else DRAWN


def _guess_by_mlx(
    rows: mx.array, ids: mx.array, rules: mx.array, sampling: Sampling
) -> tuple[mx.array, mx.array]:
    """Guess with MLX's operations; see `guess`."""
    scores = rows.astype(mx.float32)
    totals = mx.logsumexp(scores, axis=-1, keepdims=True)
    kind = kind_of(sampling)
    if kind == FILTERED:
        scores, ids, totals = _perturb_filtered(scores, totals, ids, rules, sampling)
    elif kind == DRAWN:
        ids = ids[None]
        scores = scores + _noise_of(rules, ids)
        totals = mx.logsumexp(scores, axis=-1, keepdims=True)
    columns = mx.argmax(scores, axis=-1, keepdims=True)
    values = mx.take_along_axis(scores, columns, axis=-1)
    named = mx.take_along_axis(mx.broadcast_to(ids, scores.shape), columns, axis=-1)[:, 0]
    return named, mx.stack([named.astype(mx.float32), mx.exp(values - totals)[:, 0]])


def _noise_of(rules: mx.array, ids: mx.array) -> mx.array:
    """Return the noise in logits, [rows, n], for ids [rows, n] or [1, n]."""
    low, high, temperature = read_noise(rules)
    bits = hash_with_keys(mx, low, high, ids.astype(mx.uint32))
    noise: mx.array = temperature * gumbel_from_bits(mx, bits)
    return noise


def _perturb_filtered(
    rows: mx.array, totals: mx.array, ids: mx.array, rules: mx.array, sampling: Sampling
) -> tuple[mx.array, mx.array, mx.array]:
    """Return scores, ids [rows, n] and totals of the candidates that filters see (`perturb`)."""
    count = min(candidates.SAMPLED_WIDTH, rows.shape[-1])
    best = mx.argpartition(-rows, count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(rows, best, axis=-1), axis=-1)
    best = mx.take_along_axis(best, order, axis=-1)
    logits = mx.take_along_axis(rows, best, axis=-1)
    ids = mx.take(ids, best)
    shares = mx.softmax(logits, axis=-1)
    kept = mx.ones(shares.shape, mx.bool_)
    if sampling.top_k:
        kept &= mx.arange(count)[None] < sampling.top_k
    if sampling.top_p < 1.0:
        kept &= mx.cumsum(shares, axis=-1) - shares < sampling.top_p
    if sampling.min_p > 0.0:
        kept &= shares >= sampling.min_p * shares[:, :1]
    kept |= mx.arange(count)[None] == 0
    scores = logits + _noise_of(rules, ids)
    scores = mx.where(kept, scores, scores - _DROPPED)
    # Tokens outside the candidates keep their mass.
    share = mx.exp(mx.logsumexp(logits, axis=-1, keepdims=True) - totals)
    rest = totals + mx.log(mx.maximum(1.0 - share, 0.0))
    return scores, ids, mx.logaddexp(rest, mx.logsumexp(scores, axis=-1, keepdims=True))
