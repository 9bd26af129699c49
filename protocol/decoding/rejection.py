"""The rejection rule: drafts are drawn from q, and kept so often that the output follows p.

A draft token s, drawn from q, stands with probability min(1, p(s) / q(s)). If it falls, the
bonus token is drawn from what p has more of than q, normalise(max(p - q, 0)); if all stand,
from p. Then the token at that position follows p, whatever q is, as long as s was drawn from
q. So the drafter draws from a distribution over few tokens, and sends exactly that one. A token
that was not drawn but named has all of q.

Randomness is a function of (seed, stream, position), and of the round for drafts; the three
streams are independent (`gumbel.uniform`). Why the output follows p, by induction over the
positions: let G be everything that happened before a position's token is committed.

* A position is committed once, by the accept and bonus numbers of that position, and by no
  other; no decision in G looked at them. A verification whose outcome got lost with its
  process was seen by nobody, so its numbers are still fresh.
* If a draft token s is offered there, s was drawn by the number of its position and of the
  round that prepared it. G does not depend on that number: q is a function of the tokens
  before s; outcomes are prepared by rank, not drawn; earlier drafts of the position, of which
  a trace may be left in G (they steered the fan-out), have other rounds; and whether s is
  offered is decided by q and the tokens before s, never by s or what follows it
  (`Planner.length`). A dead, late or replaced drafter only changes which q it is, or none.
  Branches share the number: at most one of them becomes part of the sequence.

So, given G, s follows q and both numbers are uniform: the token follows p. Choosing drafts by
their drawn tokens (dropping unlikely ones, say) would break this, unseen by the verifier.
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
    """Tokens and their probabilities; other tokens have none."""

    ids: Ids
    probabilities: Doubles

    def of(self, token: int) -> float:
        """The probability of a token."""
        return float(self.probabilities[self.ids == token].sum())


def target_distribution(row: Floats, sampling: Sampling) -> Distribution:
    """p: the distribution of the target's token after filters and temperature.

    Args:
        row: [vocabulary] logits.
        sampling: the request's.
    """
    ids = filter_tokens(row, sampling) if has_filter(sampling) else np.arange(row.size)
    return Distribution(ids, _apply_temperature(row[ids], sampling.temperature))


def drafter_distribution(
    ids: Ids, logits: Floats, sampling: Sampling, held_back: int
) -> Distribution:
    """q: the distribution that a draft token is drawn from.

    Saguaro sampling (Definition 14) gives the best tokens, which are those that outcomes are
    prepared for, a smaller weight. They are then accepted more readily when drawn, and more
    often the bonus token when not: more hits for fewer accepted tokens.

    Args:
        ids: [n] the drafter's best tokens, in falling order of logit.
        logits: [n] theirs; the filters see the distribution of these n alone.
        sampling: the drafter's (`drafter_sampling`); its `saguaro` is the smaller weight.
        held_back: how many of the best tokens get it (F).
    """
    if has_filter(sampling):
        columns = filter_tokens(logits, sampling)
        ids, logits = ids[columns], logits[columns]
    weights = _apply_temperature(logits, sampling.temperature)
    held = weights.copy()
    held[:held_back] *= sampling.saguaro
    # With weight 0 nothing may be left; then nothing is held back.
    weights = held if held.sum() > 0.0 else weights
    return Distribution(ids, weights / weights.sum())


def _apply_temperature(logits: Floats, temperature: float) -> Doubles:
    exact = logits.astype(np.float64)
    weights = np.exp((exact - exact.max()) / temperature)
    result: Doubles = weights / weights.sum()
    return result


def draw_token(distribution: Distribution, number: float) -> int:
    """The token at a uniform number of [0, 1): tokens share the interval by probability."""
    bounds = np.cumsum(distribution.probabilities)
    # Rounding must not leave the interval: the last token may have probability 0.
    place = min(number * bounds[-1], np.nextafter(bounds[-1], 0.0))
    return int(distribution.ids[np.searchsorted(bounds, place, side="right")])


def accepts(p: Distribution, q: Distribution, token: int, number: float) -> bool:
    """Whether a token drawn from q stands, at a uniform number of [0, 1)."""
    return number * q.of(token) < p.of(token)


def residual_distribution(p: Distribution, q: Distribution) -> Distribution:
    """What the bonus token is drawn from after a rejection: what p has more of than q."""
    drafted = np.zeros(1 + int(p.ids.max()))
    known = q.ids < drafted.size  # a drafter may send ids that no vocabulary has
    drafted[q.ids[known]] = q.probabilities[known]
    rest = np.maximum(p.probabilities - drafted[p.ids], 0.0)
    total = rest.sum()
    # Without a rest, p and q differ by rounding alone, and p itself will do.
    return Distribution(p.ids, rest / total) if total > 0.0 else p


def draw_draft_token(q: Distribution, position: int, sampling: Sampling, number: int) -> int:
    """The draft token at a position, drawn from q in this round."""
    return draw_token(q, uniform(sampling.seed, DRAFT, number, position))


def verify_draft(
    rows: Floats,
    draft: Sequence[int],
    distributions: Sequence[DraftDistribution],
    first: int,
    sampling: Sampling,
) -> tuple[int, int]:
    """How many draft tokens stand, and the bonus token.

    Args:
        rows: [1 + draft tokens, vocabulary] the target's logits, before and after each.
        draft: the draft tokens.
        distributions: what each was drawn from; empty if none was drawn.
        first: the absolute position of the first draft token.
        sampling: the request's.

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
    """The message for q, in double precision: exactly what the token was drawn from."""
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
