"""Training batches.

Texts of similar length are batched together, shorter ones in larger numbers, so that steps cost
about the same and contain little padding. Every length is a multiple of 64, and there are few: a
device prepares kernels for each.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.distill.data import ANSWER, USER, Integers, Texts

_LENGTHS = 4
"""Number of different batch lengths."""
_STEP = 64
"""Lengths are multiples of this, positions of twice as much."""


class TrainingBatch(NamedTuple):
    """One step's sequences and the positions whose next token is trained."""

    tokens: Integers
    """[batch, length]"""
    positions: Integers
    """[count] flat positions; padded with zeros to a fixed count."""
    weights: npt.NDArray[np.float32]
    """[count] 0 for padding."""
    rows: Integers
    """[batch] indices of these rows in the texts."""


class _Bucket(NamedTuple):
    """Texts of similar length."""

    rows: Integers
    """Indices of its texts."""
    length: int
    """Length of the longest, rounded up."""
    batch: int
    """Rows per step."""
    learned: int
    """Trained positions per step; a batch with more of them skips some at random."""

    @property
    def steps(self) -> int:
        """Steps that cover each of its texts once; the last is filled up with the first ones."""
        return -(-len(self.rows) // self.batch)


class Batches:
    """Batches of about as many tokens each as `batch` texts of maximum length."""

    def __init__(
        self, texts: Texts, batch: int, *, user_weight: float = 0.0, seed: int = 0
    ) -> None:
        next_kinds = np.zeros_like(texts.kinds)
        next_kinds[:, :-1] = texts.kinds[:, 1:]
        self._tokens = texts.tokens
        self._weights = (next_kinds == ANSWER).astype(np.float32)
        self._weights += np.float32(user_weight) * (next_kinds == USER)
        self._seed = seed
        used = _count_used(texts)
        longest = min(_round_up(int(used.max())), texts.tokens.shape[1])
        self._whole = self._bucket(np.arange(len(used), dtype=np.int32), longest, batch)
        self._buckets = [
            self._bucket(rows, length, max(batch, batch * longest // length))
            for rows, length in _split_by_length(used, longest, batch)
        ]
        self._orders: dict[int, list[tuple[int, Integers]]] = {}

    @property
    def passes(self) -> int:
        """Number of batches `in_order` that cover every text once."""
        return self._whole.steps

    @property
    def tokens_per_step(self) -> int:
        """Approximate number of tokens per step, padding included."""
        return self._whole.batch * self._whole.length

    @property
    def steps(self) -> int:
        """Steps that cover every text at least once."""
        return sum(bucket.steps for bucket in self._buckets)

    def at(self, step: int) -> TrainingBatch:
        """Return the batch of a training step, a function of the step alone."""
        epoch, place = divmod(step, self.steps)
        number, rows = self._order(epoch)[place]
        return self._of(self._buckets[number], rows, np.random.default_rng([self._seed, 1, step]))

    def in_order(self, number: int) -> TrainingBatch:
        """Return the `number`-th batch of a single pass over all texts in order.

        All have the greatest length; the last is filled up with row 0, unweighted.
        """
        size = self._whole.batch
        rows = np.arange(number * size, (number + 1) * size, dtype=np.int32)
        real = rows < len(self._tokens)
        chance = np.random.default_rng([self._seed, 2])
        return self._of(self._whole, np.where(real, rows, 0), chance, real)

    def _bucket(self, rows: Integers, length: int, batch: int) -> _Bucket:
        per_row = float((self._weights[rows, :length] > 0).sum()) / len(rows)
        positions = -(-int(1.1 * per_row * batch + 1) // (2 * _STEP)) * 2 * _STEP
        return _Bucket(rows, length, batch, min(positions, batch * length))

    def _order(self, epoch: int) -> list[tuple[int, Integers]]:
        """Return the bucket and the rows of an epoch's steps."""
        if epoch not in self._orders:
            chance = np.random.default_rng([self._seed, 0, epoch])
            steps = []
            for number, bucket in enumerate(self._buckets):
                rows = np.resize(chance.permutation(bucket.rows), bucket.steps * bucket.batch)
                steps += [(number, part) for part in rows.reshape(bucket.steps, bucket.batch)]
            order = chance.permutation(len(steps))
            self._orders = {epoch: [steps[int(place)] for place in order]}
        return self._orders[epoch]

    def _of(
        self,
        bucket: _Bucket,
        rows: Integers,
        chance: np.random.Generator,
        real: npt.NDArray[np.bool_] | None = None,
    ) -> TrainingBatch:
        weights = self._weights[rows, : bucket.length]
        if real is not None:
            weights = weights * real[:, None].astype(np.float32)
        flat = weights.reshape(-1)
        found = np.flatnonzero(flat)
        if len(found) > bucket.learned:
            found = np.sort(chance.choice(found, bucket.learned, replace=False))
        positions = np.zeros(bucket.learned, np.int32)
        positions[: len(found)] = found
        chosen = np.zeros(bucket.learned, np.float32)
        chosen[: len(found)] = flat[found]
        return TrainingBatch(self._tokens[rows, : bucket.length], positions, chosen, rows)


def _round_up(length: int) -> int:
    return -(-length // _STEP) * _STEP


def _count_used(texts: Texts) -> Integers:
    """Return [rows], the tokens of each text without padding."""
    length = texts.kinds.shape[1]
    used: Integers = length - np.argmax(texts.kinds[:, ::-1] > 0, axis=1).astype(np.int32)
    return used


def _split_by_length(used: Integers, longest: int, batch: int) -> list[tuple[Integers, int]]:
    """Return rows and length of each bucket; one with less than a step's texts joins the next."""
    limits = sorted({_round_up(-(-longest * part // _LENGTHS)) for part in range(1, _LENGTHS)})
    limits = [limit for limit in limits if limit < longest]
    buckets, first = [], 0
    for limit in [*limits, longest]:
        rows = np.flatnonzero((used > first) & ((used <= limit) | (limit == longest)))
        if limit < longest and len(rows) < batch * longest // limit:
            continue
        buckets.append((rows.astype(np.int32), limit))
        first = limit
    if len(buckets) > 1 and len(buckets[-1][0]) < batch:
        last, before = buckets.pop(), buckets.pop()
        buckets.append((np.concatenate([before[0], last[0]]), longest))
    return buckets
