"""A statistical model of both models: the target's tokens, and how well the drafter guesses.

As under the coupled rule, the answer is fixed in advance. The drafter ranks candidates for each
position; the target's token has some rank there. Rank 0, the drafted token, has probability
alpha_p, the acceptance rate at this position; the rank after a rejection follows the power law of
`AcceptanceModel`. alpha_p varies for two reasons: easy and hard stretches of text, and the
drafter's knowledge of single tokens (its confidence is alpha_p, drawn from a Beta distribution
around the stretch's rate). Not modelled: candidate lists that are better where the drafter is more
confident, and confidence that is biased.
"""

import numpy as np
import numpy.typing as npt

from orchestrator.simulation.scenario import AcceptanceModel
from protocol.decoding.token_tree import TokenTree
from protocol.errors import UsageError

_RANKS = 512
"""Ids per position: the candidate of rank i at position p is token p * _RANKS + i."""

_AHEAD = 256
"""Positions beyond the answer's end that a draft may cover."""


class Oracle:
    """Deterministic in (acceptance, length, seed); independent of the way of decoding."""

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
        confidences = rates if acceptance.insight else np.full(count, acceptance.alpha)
        self._ranks: list[int] = ranks.tolist()
        self._full_ranks: list[int] = np.minimum(full, _RANKS - 1).tolist()
        self._confidences: list[float] = confidences.tolist()
        self._strays: list[float] = random.permutation(confidences).tolist()

    def token(self, position: int) -> int:
        """Return the target's token at this position."""
        return position * _RANKS + self._ranks[position]

    def outcome(self, position: int, tree: TokenTree) -> tuple[int, int]:
        """Return the outcome of verifying a tree whose first token is at `position`.

        Returns:
            The row of the last accepted token, and the bonus token.
        """
        row, depth = 0, 0
        while (following := tree.children[row].get(self.token(position + depth + 1))) is not None:
            row, depth = following, depth + 1
        return row, self.token(position + depth + 1)

    @staticmethod
    def best_guess(position: int) -> int:
        """Return the drafter's best guess after a correct or an incorrect prefix."""
        return position * _RANKS

    def confidence(self, position: int, *, on_track: bool) -> float:
        """Return the confidence of that guess; `on_track`: the prefix is correct."""
        return (self._confidences if on_track else self._strays)[position]

    def siblings(self, position: int, count: int, *, on_track: bool) -> list[tuple[int, float]]:
        """Return the drafter's next guesses after the best one, with the confidence of each."""
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
        """Return the drafter's candidates for a bonus token after the first `rejected` ones."""
        start = position * _RANKS
        if rejected:
            return list(range(start + rejected, start + rejected + count))
        token, rank = self.token(position), self._full_ranks[position]
        others = [t for t in range(start, start + count + 1) if t != token]
        return [*others[:rank], token, *others[rank:]][:count]


def _rates(
    acceptance: AcceptanceModel, count: int, random: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return alpha_p: [count] acceptance rates with mean `acceptance.alpha`."""
    # The stretch changes with probability 1/stretch per token; a fraction alpha of all tokens is
    # easy.
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
    """Return ranks R with Pr[R >= F] = (1 - first) F^-exponent for F >= 1, from uniform numbers."""
    ratio = (1.0 - first) / np.maximum(uniform, 1e-12)
    # The cap keeps huge ranks, which are never prepared, within integers.
    ranks = np.minimum(np.maximum(ratio, 1e-9) ** (1.0 / exponent), 1e6)
    return np.where(ratio > 1.0, np.floor(ranks), 0).astype(np.int64)
