"""What a prompt lookup is worth: which of its tokens to verify, and whether a free run ends for it.

Pure; in tokens, as all of the planner's values.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from orchestrator.learning.cost_model import CostModel
from orchestrator.sequence.draft import Draft
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.tree_choice import count_chain, find_best


def choose_lookup(planner: Planner, found: Draft, *, alone: bool = False) -> list[int]:
    """The rows of a lookup that are worth verifying; `alone`: no drafter works beside."""
    rows, chances = planner.rank(found, "lookup")
    chain = count_chain(rows, found.parents)
    known = planner.estimates
    if planner.num_draft_tokens:
        return rows  # `Planner.choose_nodes` keeps as many
    if not alone:
        values = planner.value_nodes(chances, chain)
    elif known.batch.other_tokens:
        cost = _cost_of_asking(known, missed=1)
        plain, *more = _value_in_company(known, chances)
        values = [plain, *(value - cost for value in more)]
    else:
        values = _value_alone(known, chances)
    count = find_best(values, chain)
    by_hand = count and not planner.is_chain_only and planner.tree_nodes
    return rows[: by_hand or count]


def value_of_stopping(planner: Planner, found: Draft) -> float:
    """What it is worth to end a free run for a lookup.

    Its first token is being computed, so that only what follows it can be verified, and only if it
    is right. Otherwise plain decoding begins anew; in any case the target waits a while.
    """
    rates = planner.acceptance_rates(found.pick(found.main), "lookup")
    if not rates:
        return 0.0
    known, right, chances = planner.estimates, rates[0], list(accumulate(rates[1:], mul))
    if known.batch.other_tokens:
        behind, cost = _value_in_company(known, chances), _cost_of_asking(known, missed=2)
    else:
        wait_ms = known.idle_ms["lookup"].value
        start_ms = max(wait_ms, known.run_start_ms.value)
        lost_ms = right * wait_ms + (1.0 - right) * start_ms
        behind, cost = _value_alone(known, chances), lost_ms / known.plain_latency.of(1)
    return right * (max(behind) - behind[0]) - cost


def may_stop(planner: Planner) -> bool:
    """Whether there could be a lookup that is worth the end of a free run."""
    known = planner.estimates
    in_company = known.batch.other_tokens > 0
    return not in_company or _cost_of_asking(known, missed=2) < planner.depth - 1


def _value_in_company(known: CostModel, chances: Sequence[float]) -> list[float]:
    """As `Planner.value_nodes`, where others run free.

    Time of a longer pass that `_cost_of_asking` has already is not charged again.
    """
    plain_ms, streams = known.plain_latency, known.batch.streams
    first, free_ms = known.batch.other_tokens + 1, plain_ms.of(streams)
    values = list[float]()
    for count, expected in enumerate(accumulate(chances, initial=1.0)):
        passes = (plain_ms.of(first + count) - plain_ms.of(first)) / free_ms
        values.append(expected - streams * max(0.0, passes - known.batch.longer))
    return values


def _cost_of_asking(known: CostModel, *, missed: int) -> float:
    """What it costs requests that run free together if one of them has a lookup verified.

    The target waits for it, its pass takes longer, and they go on without it: when it leaves,
    and when it comes back.
    """
    streams = known.batch.streams
    waits = known.idle_ms["lookup"].value / known.plain_latency.of(streams)
    return streams * (waits + known.batch.longer) + missed * known.batch.missed_passes


def _value_alone(known: CostModel, chances: Sequence[float]) -> list[float]:
    """As `Planner.value_nodes`, where no drafter works beside and nothing else is decoded."""
    throughput = 1.0 / known.plain_latency.of(1)
    return [
        expected - throughput * known.plain_latency.of(count + 1)
        for count, expected in enumerate(accumulate(chances, initial=1.0))
    ]
