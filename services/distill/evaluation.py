"""Evaluate a drafter: compare both distributions at every position of held-out texts."""

import math
import time
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from protocol.decoding.sampler import Ids
from services.distill.batches import Batches
from services.distill.data import Integers, Texts
from services.distill.logits import TargetDistribution, logits_at
from services.distill.objective import overlap

WIDTHS = (1, 2, 3, 4, 8, 16)
"""Fan-outs F at which hits are counted."""
TEMPERATURES = (0.7, 1.0)

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Acceptance(msgspec.Struct, frozen=True):
    """Expected acceptance of one draft token at one temperature."""

    temperature: float
    rejection: float
    """Mean of 1 - TV: exact."""
    coupled: float
    """Share of positions where both choose the same token with the same noise, drawn once."""
    coupled_bound: float
    """Mean of (1 - TV) / (1 + TV)."""


class Figures(msgspec.Struct, frozen=True):
    """Figures of a drafter on some texts."""

    positions: int
    greedy_positions: int
    """Number of positions in the target's greedy answers."""
    greedy_agreement: float
    """Share of greedy positions where both have the same best token."""
    by_category: dict[str, float]
    """Greedy agreement, where texts have a category."""
    acceptance: list[Acceptance]
    """Acceptance over the answers of all temperatures."""
    hits: dict[str, float]
    """F -> share of greedy positions where the target's best token is in the drafter's top F."""
    hits_after_rejection: dict[str, float]
    """The same where the drafter's best token was wrong, and is left out."""


class _Row(NamedTuple):
    """Results per position, on the host."""

    rank: Ids
    """Rank of the target's best token at the drafter, from 1; 0 if not in its head."""
    overlaps: Floats
    """[count, temperatures]"""
    coupled: Flags
    """[count, temperatures]"""
    row: Integers
    """Index of the text."""


class DeployedDrafter(NamedTuple):
    """A drafter as it is deployed."""

    module: Any
    head_ids: Ids | None


def evaluate(
    target: Any,
    drafter: DeployedDrafter,
    vocabulary: int,
    texts: Texts,
    batch: int,
    *,
    seconds: float = math.inf,
) -> Figures:
    """Compare the two distributions at every answer token of the texts.

    Args:
        target: an mlx-lm model.
        vocabulary: tokens that exist.
        batch: texts per forward pass.
        seconds: time limit: texts that do not fit are skipped, but one pass always runs.
    """
    started = time.monotonic()
    batches = Batches(texts, min(batch, len(texts.rows)))
    head = None if drafter.head_ids is None else mx.array(drafter.head_ids)
    distribution = TargetDistribution(target, vocabulary, head)
    measured = []
    for number in range(batches.passes):
        one = batches.in_order(number)
        tokens, positions = mx.array(one.tokens), mx.array(one.positions)
        hidden = distribution.read_hidden(tokens, positions)
        q_logits = logits_at(drafter.module, tokens, positions)
        q_logits = q_logits[:, : vocabulary if head is None else None]
        rank, overlaps, coupled = _compare(distribution, hidden, q_logits, head, number)
        real = one.weights > 0
        rows = one.rows[one.positions // tokens.shape[1]]
        measured.append(_Row(rank[real], overlaps[real], coupled[real], rows[real]))
        if (time.monotonic() - started) * (number + 2) / (number + 1) > seconds:
            break
    whole = _Row(*(np.concatenate(parts) for parts in zip(*measured, strict=True)))
    return _figures(whole, texts)


def _compare(
    distribution: TargetDistribution,
    hidden: mx.array,
    q_logits: mx.array,
    head: mx.array | None,
    number: int,
) -> tuple[Ids, Floats, Flags]:
    """Return rank, overlaps and coupled of every position of batch `number`; see `_Row`."""
    parts = []
    keys = mx.random.split(mx.random.key(number), len(distribution.split(len(hidden))))
    for key, chunk in zip(keys, distribution.split(len(hidden)), strict=True):
        p_logits = distribution.logits(hidden[chunk])
        part = _compare_chunk(distribution, p_logits, q_logits[chunk], head, key)
        mx.eval(part)
        parts.append([np.array(column) for column in part])
    rank, overlaps, coupled = (np.concatenate(column) for column in zip(*parts, strict=True))
    return rank, overlaps.astype(np.float64), coupled


def _compare_chunk(
    distribution: TargetDistribution,
    p_logits: mx.array,
    q_logits: mx.array,
    head: mx.array | None,
    key: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    best = mx.argmax(p_logits, axis=-1)[:, None]
    ids = mx.arange(p_logits.shape[-1]) if head is None else head
    is_best = ids[None] == best
    own = mx.where(is_best, q_logits, 0.0).sum(axis=-1, keepdims=True)
    place = (q_logits > own).sum(axis=-1) + 1
    rank = mx.where(mx.any(is_best, axis=-1), place, 0)
    overlaps, coupled = [], []
    keys = mx.random.split(key, len(TEMPERATURES))
    for temperature, noise_key in zip(TEMPERATURES, keys, strict=True):
        p = distribution.probabilities(p_logits, temperature)
        overlaps.append(overlap(p, mx.softmax(q_logits / temperature, axis=-1)))
        noise = mx.random.gumbel(p_logits.shape, key=noise_key)
        theirs = mx.argmax(p_logits / temperature + noise, axis=-1)
        own_noise = noise if head is None else mx.take(noise, head, axis=-1)
        ours = ids[mx.argmax(q_logits / temperature + own_noise, axis=-1)]
        coupled.append(theirs == ours)
    return rank, mx.stack(overlaps, axis=1), mx.stack(coupled, axis=1)


def _figures(measured: _Row, texts: Texts) -> Figures:
    greedy_rows = np.array([row.temperature == 0 for row in texts.rows])
    greedy = greedy_rows[measured.row]
    rank = measured.rank[greedy]
    categories = np.array([row.category for row in texts.rows])[measured.row[greedy]]
    wrong = rank[rank != 1]
    shares = measured.overlaps
    return Figures(
        positions=len(measured.rank),
        greedy_positions=len(rank),
        greedy_agreement=_share(rank == 1),
        by_category={
            str(name): _share(rank[categories == name] == 1)
            for name in np.unique(categories)
            if name
        },
        acceptance=[
            Acceptance(
                temperature,
                rejection=float(shares[:, index].mean()),
                coupled=float(measured.coupled[:, index].mean()),
                coupled_bound=float((shares[:, index] / (2 - shares[:, index])).mean()),
            )
            for index, temperature in enumerate(TEMPERATURES)
        ],
        hits={str(width): _share((rank > 0) & (rank <= width)) for width in WIDTHS},
        hits_after_rejection={
            str(width): _share((wrong > 0) & (wrong <= width + 1)) for width in WIDTHS
        },
    )


def _share(flags: Flags) -> float:
    return float(flags.mean()) if flags.size else 0.0
