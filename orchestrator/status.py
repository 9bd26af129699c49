"""The answer to `StatusRequest`: services, requests, the last seconds, and the planner."""

from itertools import islice

from orchestrator.learning.cost_model import CostModel
from orchestrator.registry import Peer, Registry
from orchestrator.requests.queue import RequestQueue
from orchestrator.requests.request import Request
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner
from orchestrator.telemetry.recorder import ratio
from protocol.messages import (
    PlannerState,
    SequenceState,
    SequenceStatus,
    ServiceStatus,
    Status,
    StatusRequest,
)
from protocol.process.step_times import StepTimes

_MOST_SEQUENCES = 64
"""Most sequences that are described one by one."""
_MISSING = {
    "verifier": "there is no verifier at the moment: requests wait",
    "drafter": "there is no drafter at the moment: the target decodes plainly",
}


class StatusReporter:
    """Describes a running orchestrator."""

    def __init__(
        self,
        pid: int,
        model: str,
        *,
        registry: Registry,
        requests: RequestQueue,
        estimates: CostModel,
    ) -> None:
        self._pid = pid
        self._model = model
        self._registry = registry
        self._requests = requests
        self._estimates = estimates
        self.steps = StepTimes()
        """Of the orchestrator's loop."""

    def report(self, question: StatusRequest, *, serving: bool, dropped: int, now: float) -> Status:
        """Return the answer to a status request.

        Args:
            question: the status request.
            serving: returns True if the client's request is in progress or waits.
            dropped: messages that could not be delivered since the start.
            now: seconds of the monotonic clock.
        """
        registry, requests = self._registry, self._requests
        active, waiting = requests.counts
        running = islice(requests.running.values(), _MOST_SEQUENCES)
        return Status(
            request=question.request,
            question=question.question,
            serving=serving,
            dropped=dropped,
            longest_step_ms=1e3 * self.steps.longest_s,
            pid=self._pid,
            model=self._model,
            services=[self._describe_service(peer) for peer in registry.peers.values()],
            active=active,
            waiting=waiting,
            refused=registry.rejected,
            marked_for_kill=registry.marked_for_kill,
            degraded=self._list_problems(),
            lookup_only=registry.lookup_only,
            window=requests.recent(now),
            planner=describe_planner(Planner("ssd", self._estimates), now),
            sequences=[_describe_request(request, now) for request in running],
        )

    def _list_problems(self) -> list[str]:
        registry = self._registry
        roles = ["verifier"] if registry.lookup_only else list(_MISSING)
        sentences = [_MISSING[role] for role in roles if role not in registry.peers]
        if registry.unreadable:
            sentences.append(
                f"the drafter drafts without reading the target: {registry.unreadable}"
            )
        return sentences

    def _describe_service(self, peer: Peer) -> ServiceStatus:
        hello = peer.hello
        return ServiceStatus(
            silent_s=self._registry.hang_detector.silent_s(peer.address),
            role=hello.role,
            pid=hello.pid,
            backend=hello.backend,
            model=hello.model,
            compute_unit=hello.compute_unit,
            context_length=hello.context_length,
            weight_bytes=hello.weight_bytes,
            ranks=hello.ranks,
            preparation=hello.preparation,
        )


def describe_planner(planner: Planner, now: float) -> PlannerState:
    """Describe this planner's plan for the next round; `now` on the monotonic clock."""
    switch = planner.estimates.switch(planner.mode)
    speculating = planner.should_speculate
    plain_tok_s, plain_age_s = planner.report_plain(now)
    return PlannerState(
        mode=planner.mode,
        speculating=speculating,
        num_draft_tokens=planner.depth if speculating else 0,
        branches=planner.branches if speculating and planner.mode == "ssd" else 0,
        speculative_tok_s=switch.speculative_tok_s if switch is not None else 0.0,
        plain_tok_s=plain_tok_s,
        plain_age_s=plain_age_s,
    )


def _describe_request(request: Request, now: float) -> SequenceStatus:
    sequence, recorder = request.sequence, request.sequence.recorder
    return SequenceStatus(
        sequence=sequence.number,
        state=_state_of(request),
        age_s=now - recorder.received_at,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        computed_tokens=request.computed_tokens,
        tokens=recorder.emitted,
        tok_s=recorder.tok_s,
        acceptance_rate=ratio(recorder.accepted, recorder.drafted),
        hit_rate=ratio(recorder.hits, recorder.hits + recorder.misses),
        planner=describe_planner(sequence.planner, now),
    )


def _state_of(request: Request) -> SequenceState:
    match request.sequence.phase:
        case Phase.VERIFYING:
            return "verify" if request.is_filled else "prefill"
        case Phase.DRAFTING:
            return "draft"
        case Phase.STRANDED | Phase.HELD | Phase.FINISHED:
            return "stranded"
