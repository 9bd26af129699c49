"""A model of both models: what the target emits, and how well the drafter guesses each token.

As under the coupled rule, the answer is fixed beforehand. The drafter ranks candidates for
each position; the target's token has some rank there. Rank 0, the drafted token, has
probability alpha_p, the chance of acceptance at this position; the rank after a rejection
follows the power law of `AcceptanceModel`. alpha_p has two sources of variation: easy and hard
stretches of text, and a drafter's knowledge of single tokens (its confidence is alpha_p,
drawn from a Beta law around the stretch's rate). What is not modelled: a candidate list
that is better where the drafter is surer, and a confidence that is wrong on average.
"""

import numpy as np
import numpy.typing as npt

from orchestrator.simulation.scenario import AcceptanceModel
from protocol.decoding.token_tree import TokenTree
from protocol.errors import UsageError

_RANKS = 512
"""Ids per position: the candidate of rank i at position p is token p * _RANKS + i."""

_AHEAD = 256
"""Positions behind the answer's end that a draft may reach."""


class Oracle:
    """Deterministic in (acceptance, length, seed); the same for every way to decode."""

    def __init__(self, acceptance: AcceptanceModel, length: int, seed: int) -> None:
        if (acceptance.r_all is None) != (acceptance.first_all is None):
            raise UsageError("r_all and first_all describe one curve; give both or neither")
        random = np.random.default_rng(seed)
        count = length + _AHEAD
        rates = _rates(acceptance, count, random)
        accepted = random.random(count) < rates
        behind = _draw_ranks(acceptance.first, acceptance.r, random.random(count))
        ranks = np.where(accepted, 0, np.minimum(behind + 1, _RANKS - 1))
        full = ranks
        if acceptance.r_all is not None and acceptance.first_all is not None:
            full = _draw_ranks(acceptance.first_all, acceptance.r_all, random.random(count))
        self._acceptance = acceptance
        known = rates if acceptance.insight else np.full(count, acceptance.alpha)
        self._ranks: list[int] = ranks.tolist()
        self._full_ranks: list[int] = np.minimum(full, _RANKS - 1).tolist()
        self._confidences: list[float] = known.tolist()
        self._strays: list[float] = random.permutation(known).tolist()

    def token(self, position: int) -> int:
        """The target's token there."""
        return position * _RANKS + self._ranks[position]

    def outcome(self, position: int, tree: TokenTree) -> tuple[int, int]:
        """What verifying a tree, whose first token stands at `position`, will return.

        Returns:
            The row of the last token that stands, and the bonus token.
        """
        row, depth = 0, 0
        while (following := tree.children[row].get(self.token(position + depth + 1))) is not None:
            row, depth = following, depth + 1
        return row, self.token(position + depth + 1)

    @staticmethod
    def best_guess(position: int) -> int:
        """The drafter's best guess, after the right tokens or others."""
        return position * _RANKS

    def confidence(self, position: int, *, on_track: bool) -> float:
        """How sure the drafter is of its guess; `on_track`: what precedes it is right."""
        return (self._confidences if on_track else self._strays)[position]

    def siblings(self, position: int, count: int, *, on_track: bool) -> list[tuple[int, float]]:
        """The drafter's next guesses behind the best one, and how sure it is of each."""
        fell = 1.0 - self.confidence(position, on_track=on_track)
        hits = [0.0, *(self._hit(rank) for rank in range(1, count + 1))]
        start = position * _RANKS
        return [
            (start + rank, fell * (hits[rank] - hits[rank - 1])) for rank in range(1, count + 1)
        ]

    def _hit(self, candidates: int) -> float:
        curve = self._acceptance
        return 1.0 - float((1.0 - curve.first) * candidates**-curve.r)

    def bonuses(self, position: int, count: int, *, rejected: int) -> list[int]:
        """The drafter's best candidates for a bonus token, but for the first ones, `rejected`."""
        start = position * _RANKS
        if rejected:
            return list(range(start + rejected, start + rejected + count))
        token, rank = self.token(position), self._full_ranks[position]
        others = [t for t in range(start, start + count + 1) if t != token]
        return [*others[:rank], token, *others[rank:]][:count]


def _rates(
    acceptance: AcceptanceModel, count: int, random: np.random.Generator
) -> npt.NDArray[np.float64]:
    """alpha_p: [count] chances of acceptance, of mean `acceptance.alpha`."""
    # The stretch changes with probability 1/stretch per token; alpha of all tokens are easy.
    fresh = random.random(count) < 1.0 / acceptance.stretch
    fresh[0] = True
    draws = random.random(count) < acceptance.alpha
    easy = draws[np.maximum.accumulate(np.where(fresh, np.arange(count), 0))]
    rise, fall = acceptance.burst * (1.0 - acceptance.alpha), acceptance.burst * acceptance.alpha
    rates = np.where(easy, acceptance.alpha + rise, acceptance.alpha - fall)
    if acceptance.insight == 0.0:
        return rates
    # Beta(a s, (1 - a) s) has mean a and variance a (1 - a) / (1 + s).
    strength = 1.0 / acceptance.insight - 1.0
    inner = np.clip(rates, 1e-6, 1.0 - 1e-6)
    drawn = random.beta(inner * strength, (1.0 - inner) * strength)
    return np.where((rates > 0.0) & (rates < 1.0), drawn, rates)


def _draw_ranks(
    first: float, exponent: float, uniform: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Ranks R with Pr[R >= F] = (1 - first) F^-exponent for F >= 1, from uniform numbers."""
    ratio = (1.0 - first) / np.maximum(uniform, 1e-12)
    # The cap keeps huge ranks, which are never prepared for, within integers.
    ranks = np.minimum(np.maximum(ratio, 1e-9) ** (1.0 / exponent), 1e6)
    return np.where(ratio > 1.0, np.floor(ranks), 0).astype(np.int64)
