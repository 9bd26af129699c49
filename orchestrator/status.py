"""What whoever asks is told of the requests in hand, of late, and of the plans for them."""

from itertools import islice

import msgspec

from orchestrator.learning.cost_model import CostModel
from orchestrator.requests.queue import RequestQueue
from orchestrator.requests.request import Request
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner
from orchestrator.telemetry.recorder import ratio
from protocol.messages import PlannerState, SequenceState, SequenceStatus, Status

_MOST = 64
"""Sequences that are told of one by one."""


def overview(status: Status, requests: RequestQueue, estimates: CostModel, now: float) -> Status:
    """The status, with what the orchestrator knows of its requests."""
    return msgspec.structs.replace(
        status,
        window=requests.recent(now),
        planner=choice_of(Planner("ssd", estimates)),
        sequences=[_seen(answer, now) for answer in islice(requests.running.values(), _MOST)],
    )


def choice_of(plan: Planner) -> PlannerState:
    """What this plan would do in the next round."""
    pace = plan.estimates.pace(plan.mode)
    speculating = plan.speculates
    longest = plan.sequential if plan.mode == "sd" else plan.depth
    return PlannerState(
        mode=plan.mode,
        speculating=speculating,
        num_draft_tokens=longest if speculating else 0,
        branches=plan.branches if speculating and plan.mode == "ssd" else 0,
        speculative_tok_s=pace.speculative_tok_s if pace is not None else 0.0,
        plain_tok_s=plan.plain_tok_s,
    )


def _seen(answer: Request, now: float) -> SequenceStatus:
    sequence, done = answer.sequence, answer.sequence.recorder
    return SequenceStatus(
        sequence=sequence.number,
        state=_state(answer),
        age_s=now - done.received_at,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens or 0,
        tokens=done.emitted,
        tok_s=done.tok_s,
        acceptance_rate=ratio(done.accepted, done.drafted),
        hit_rate=ratio(done.hits, done.hits + done.misses),
        planner=choice_of(sequence.plan),
    )


def _state(answer: Request) -> SequenceState:
    match answer.sequence.phase:
        case Phase.VERIFYING:
            return "verify" if answer.cached_tokens is not None else "prefill"
        case Phase.DRAFTING:
            return "draft"
        case Phase.STRANDED | Phase.FINISHED:
            return "stranded"
