"""One line about one child of the supervisor."""

from launch.models.pair import Pair
from launch.settings.settings import StackSettings
from launch.stack.child import Child
from protocol.messages import ProcessStatus


def status_of(
    child: Child, state: str, restarts: int, settings: StackSettings, pair: Pair
) -> ProcessStatus:
    """What people and programs are told of it."""
    backend, model, device = {
        "orchestrator": ("", pair.model, ""),
        "verifier": ("mlx", pair.model, settings.target_device),
        "gateway": ("", "", ""),
        "drafter": (pair.backend, pair.drafts_with, settings.draft_device),
    }[child.role]
    return ProcessStatus(
        role=child.role,
        pid=child.pid,
        backend=backend,
        model=model,
        state=state,
        restarts=restarts,
        device=device,
        emulated_cost=settings.emulate_target_cost if child.role == "verifier" else "",
    )
