"""The rejection rule: drafts are sampled from q, and accepted such that the output follows p.

A draft token s, drawn from q, is accepted with probability min(1, p(s) / q(s)). After a rejection,
the bonus token is drawn from the residual, normalise(max(p - q, 0)); if all are accepted, from p.
Then the token at that position follows p, whatever q is, as long as s was drawn from q. So the
drafter draws from a distribution over few tokens, and sends exactly that one. A token that was not
sampled, but proposed deterministically, has q = 1.

Randomness is a function of (seed, stream, position), and of the round for drafts; the three streams
are independent (`gumbel.uniform`). Why the output follows p, by induction over the positions: let G
be everything that happened before a position's token is committed.

* A position is committed once, by the accept and bonus numbers of that position, and by no
  other; no decision in G looked at them. A verification whose outcome was lost with its
  process influenced nothing, so its numbers are still fresh.
* If a draft token s is offered there, s was drawn by the number of its position and of the
  round that prepared it. G does not depend on that number: q is a function of the tokens
  before s; outcomes are prepared by rank, not drawn; earlier drafts of the position, which may
  have left a trace in G (they steered the fan-out), have other rounds; and whether s is offered
  is decided by q and the tokens before s, never by s or what follows it (`Planner.length`). A
  dead, late or replaced drafter only changes which q it is, or none. Branches share the number:
  at most one of them becomes part of the sequence.

So, given G, s follows q and both numbers are uniform: the token follows p. Choosing drafts by their
drawn tokens (dropping unlikely ones, say) would break this without the verifier noticing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.decoding.gumbel import ACCEPT, BONUS, DRAFT, uniform
from protocol.decoding.sampler import Floats, Ids, filter_tokens, has_filter
from protocol.decoding.sampling_params import is_valid_distribution
from protocol.errors import ProtocolError
from protocol.messages import DraftDistribution, Sampling

Doubles = npt.NDArray[np.float64]


class Distribution(NamedTuple):
    """Tokens and their probabilities; all other tokens have probability 0."""

    ids: Ids
    probabilities: Doubles

    def of(self, token: int) -> float:
        """Return the probability of a token."""
        return float(self.probabilities[self.ids == token].sum())


def target_distribution(row: Floats, sampling: Sampling) -> Distribution:
    """Return p: the distribution of the target's token after filters and temperature.

    Args:
        row: [vocabulary] logits.
        sampling: the request's parameters.
    """
    ids = filter_tokens(row, sampling) if has_filter(sampling) else np.arange(row.size)
    return Distribution(ids, _apply_temperature(row[ids], sampling.temperature))


def drafter_distribution(
    ids: Ids, logits: Floats, sampling: Sampling, held_back: int
) -> Distribution:
    """Return q: the distribution that a draft token is sampled from.

    Saguaro sampling (Definition 14) gives the best tokens, which are those that outcomes are
    prepared for, a smaller weight. They are then accepted more readily when drawn, and more often
    the bonus token when not: more hits for fewer accepted tokens.

    Args:
        ids: [n] the drafter's best tokens, in falling order of logit.
        logits: [n] their logits; the filters apply to the distribution of these n alone.
        sampling: the drafter's parameters (`drafter_sampling`); its `saguaro` is the smaller
            weight.
        held_back: how many of the best tokens get it (F).
    """
    if has_filter(sampling):
        columns = filter_tokens(logits, sampling)
        ids, logits = ids[columns], logits[columns]
    weights = _apply_temperature(logits, sampling.temperature)
    held = weights.copy()
    held[:held_back] *= sampling.saguaro
    # With weight 0 no token may be left; then none is held back.
    weights = held if held.sum() > 0.0 else weights
    return Distribution(ids, weights / weights.sum())


def _apply_temperature(logits: Floats, temperature: float) -> Doubles:
    exact = logits.astype(np.float64)
    weights = np.exp((exact - exact.max()) / temperature)
    result: Doubles = weights / weights.sum()
    return result


def draw_token(distribution: Distribution, number: float) -> int:
    """Return the token at a uniform number of [0, 1): tokens divide the interval by probability."""
    bounds = np.cumsum(distribution.probabilities)
    # Rounding must not leave the interval: the last token may have probability 0.
    place = min(number * bounds[-1], np.nextafter(bounds[-1], 0.0))
    return int(distribution.ids[np.searchsorted(bounds, place, side="right")])


def accepts(p: Distribution, q: Distribution, token: int, number: float) -> bool:
    """Return True if a token drawn from q is accepted, given a uniform number of [0, 1)."""
    return number * q.of(token) < p.of(token)


def residual_distribution(p: Distribution, q: Distribution) -> Distribution:
    """Return the distribution of the bonus token after a rejection: normalised max(p - q, 0)."""
    drafted = np.zeros(1 + int(p.ids.max()))
    valid = q.ids < drafted.size  # a drafter may send ids outside the vocabulary
    drafted[q.ids[valid]] = q.probabilities[valid]
    rest = np.maximum(p.probabilities - drafted[p.ids], 0.0)
    total = rest.sum()
    # Without a residual, p and q differ by rounding alone, and p itself will do.
    return Distribution(p.ids, rest / total) if total > 0.0 else p


def draw_draft_token(q: Distribution, position: int, sampling: Sampling, number: int) -> int:
    """Draw the draft token at a position from q in this round."""
    return draw_token(q, uniform(sampling.seed, DRAFT, number, position))


def verify_draft(
    rows: Floats,
    draft: Sequence[int],
    distributions: Sequence[DraftDistribution],
    first: int,
    sampling: Sampling,
) -> tuple[int, int]:
    """Return the number of accepted draft tokens, and the bonus token.

    Args:
        rows: [1 + draft tokens, vocabulary] the target's logits, before and after each.
        draft: the draft tokens.
        distributions: the distribution of each; empty if none was sampled.
        first: the absolute position of the first draft token.
        sampling: the request's parameters.

    Raises:
        ProtocolError: a token cannot have been drawn from its distribution.
    """
    sent = distributions or [DraftDistribution()] * len(draft)
    for index, (token, distribution) in enumerate(zip(draft, sent, strict=True)):
        position = first + index
        p, q = target_distribution(rows[index], sampling), _from_message(distribution, token)
        if not accepts(p, q, token, uniform(sampling.seed, ACCEPT, position)):
            return index, draw_token(
                residual_distribution(p, q), uniform(sampling.seed, BONUS, position)
            )
    p = target_distribution(rows[len(draft)], sampling)
    return len(draft), draw_token(p, uniform(sampling.seed, BONUS, first + len(draft)))


def to_message(q: Distribution) -> DraftDistribution:
    """Return the message for q, in double precision: exactly the sampled distribution."""
    return DraftDistribution(q.ids.tolist(), q.probabilities.tolist())


def _from_message(distribution: DraftDistribution, token: int) -> Distribution:
    if not is_valid_distribution(distribution, token):
        raise ProtocolError(
            f"token {token} cannot have been drawn from the distribution sent with it"
        )
    if not distribution.tokens:
        return Distribution(np.array([token]), np.ones(1))
    probabilities = np.array(distribution.probabilities)
    return Distribution(np.array(distribution.tokens), probabilities / probabilities.sum())
