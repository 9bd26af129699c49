"""What the coming and going of services means for one request."""

from collections.abc import Iterator

from orchestrator.registry import context_of
from orchestrator.requests.request import Request
from orchestrator.sequence.actions import Action
from protocol.messages import Hello, Role


def on_service_up(answer: Request, hello: Hello) -> Iterator[Action]:
    """A request meets a service for the first time."""
    if hello.role == "verifier":
        answer.sequence.recorder.emulated_cost = hello.emulated_cost
        yield from answer.sequence.limit_context(context_of(hello))
        yield from answer.sequence.verifier_up(hello.max_draft_tokens)
    else:
        yield from answer.sequence.drafter_up(hello.context_length)


def on_service_replaced(answer: Request, hello: Hello) -> Iterator[Action]:
    """A service takes the place of another while the request runs."""
    if hello.role == "verifier":
        answer.sequence.recorder.verifier_restarts += int(answer.sequence.round > 0)
    else:
        answer.sequence.recorder.drafter_restarts += 1
        yield from answer.sequence.drafter_down("drafter_swapped")
    yield from on_service_up(answer, hello)


def on_service_lost(answer: Request, role: Role) -> Iterator[Action]:
    """A service is gone."""
    if role == "drafter":
        yield from answer.sequence.drafter_down("drafter_died")
    else:
        answer.sequence.verifier_down()
        answer.deadline = None
