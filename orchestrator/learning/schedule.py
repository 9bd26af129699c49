"""Schedules: when a drafter works, and what it gains by the times of passes and drafts.

The planner asks before the first round and after every one; `ssd doctor`, `ssd models recommend`
and `ssd simulate` ask before anything is loaded.
"""

from collections.abc import Callable

from protocol.messages import Schedule, Way

Latency = Callable[[int], float]

LEAST_GAIN = 1.05
"""Gain below which messages and bad luck cost more than drafts bring."""
ASSUMED_HITS = 0.5
_LONGEST = 8
_TOLD = (1, 2, 4, 8)
"""Rows whose T_v is part of a schedule's reasons."""


def plan_schedule(
    alone: Latency, contended: Latency, draft_ms: float, acceptance: float, *,
    hits: float = ASSUMED_HITS, prefer: float = 1.0, exchange_ms: float = 0.0, wait_ms: float = 0.0,
) -> Schedule:  # fmt: skip
    """Return the fastest schedule.

    Args:
        alone: T_v by rows while the drafter is idle.
        contended: T_v by rows while the drafter works.
        draft_ms: T_d, of one token.
        acceptance: probability that a draft token is accepted.
        hits: share of the verifications after which a draft is ready; after the others it is
            drafted in turn. 0 where nothing is drafted in parallel.
        prefer: advantage that drafting in parallel needs over drafting in turn.
        exchange_ms: time between two verifications that is not spent on drafting.
        wait_ms: extra time of a draft that the target waits for, excluding its tokens.
    """
    pass_ms = {rows: alone(rows) for rows in _TOLD}

    def choose(way: Way, round_ms: Latency) -> Schedule:
        lengths = range(1, _LONGEST + 1)
        gains = {n: tokens_per_round(acceptance, n) * alone(1) / round_ms(n) for n in lengths}
        best = max(gains, key=gains.__getitem__)
        return Schedule(way, best, gains[best], pass_ms, draft_ms, acceptance)

    def in_parallel_ms(count: int) -> float:
        hidden_ms = (count + 1) * draft_ms  # the drafter processes the chain first
        round_ms = max(contended(count + 1) + exchange_ms, hidden_ms)
        return round_ms + (1.0 - hits) * (wait_ms + count * draft_ms)

    in_turn = choose("in turn", lambda n: alone(n + 1) + exchange_ms + wait_ms + n * draft_ms)
    in_parallel = choose("in parallel", in_parallel_ms)
    best = in_parallel if hits and in_parallel.gain > prefer * in_turn.gain else in_turn
    plain = Schedule("plain", 0, 1.0, pass_ms, draft_ms, acceptance)
    return best if best.gain >= LEAST_GAIN else plain


def tokens_per_round(acceptance: float, num_draft_tokens: int) -> float:
    """Return E(K) = 1 + a + ... + a^K: tokens per round at acceptance rate a."""
    return sum(acceptance**count for count in range(num_draft_tokens + 1))
