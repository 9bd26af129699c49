"""Waits for the first processes of a stack."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from launch.models.pair import Pair
from launch.settings.settings import StackSettings
from launch.stack.child import Child
from launch.stack.http_listener import HttpListener
from launch.stack.orchestrator_link import OrchestratorLink
from protocol.errors import BY_EXIT_CODE, DeadlineExceeded, RuntimeFailure
from protocol.messages import ProcessState, ServiceDown
from protocol.process.deadline import Deadline

TICK_S = 0.05
_STATUS_TIMEOUT_S = 0.5
_REPORT_EVERY_S = 10.0
_OPTIONAL_TIMEOUT_S = 5.0
"""A drafter on another machine may be absent: the stack starts without it after this time."""

_LOAD_S_PER_GB = 60.0
"""Of weights: on a busy machine they are read from a slow disk, converted, and measured."""
START_LIMIT = f"start_timeout_s, and {_LOAD_S_PER_GB:.0f} s for each GB of weights"
"""What limits a start, for messages."""

ReportState = Callable[[str, ProcessState, str], None]
"""Role, state, note."""


def allow_loading(settings: StackSettings, pair: Pair) -> StackSettings:
    """Return the settings with more time to start, for this pair's weights."""
    folders = [Path(folder) for folder in (pair.model, pair.draft_model) if folder]
    files = [file for folder in folders for file in folder.glob("*.safetensors")]
    loading_s = round(_LOAD_S_PER_GB * sum(file.stat().st_size for file in files) / 1e9)
    return msgspec.structs.replace(settings, start_timeout_s=settings.start_timeout_s + loading_s)


def await_ready(
    address: str,
    children: Mapping[str, Child],
    timeout_s: float,
    *,
    report: ReportState,
    listener: HttpListener | None,
    optional: frozenset[str],
    ended: Callable[[], bool],
) -> set[str]:
    """Wait until all processes are ready; return those of `optional` that are not.

    Raises:
        ModelError, UsageError: a child could not start, with its reason.
        RuntimeFailure: a child died, was not ready in time, or the stack `ended` meanwhile.
    """
    deadline, optional_deadline = Deadline(timeout_s), Deadline(_OPTIONAL_TIMEOUT_S)
    quiet = Deadline(_REPORT_EVERY_S)
    needed = [child for role, child in children.items() if role not in optional]
    missing = {"verifier", "drafter"} & children.keys()
    with OrchestratorLink(address) as link:
        for _ in _looks(needed, deadline, missing, ended):
            status = link.await_status(_STATUS_TIMEOUT_S)
            for role in missing & {s.role for s in status.services} if status else set():
                missing.remove(role)
                report(role, "running", "")
            may_miss = missing <= optional
            if may_miss and _may_start_without(children, missing, optional_deadline):
                break
            if quiet.passed:
                quiet = Deadline(_REPORT_EVERY_S)
                note = f"still loading, {timeout_s - deadline.remaining:.0f} s so far"
                for late in sorted(missing):
                    report(late, "starting", note + getattr(children.get(late), "hint", ""))
    report("orchestrator", "running", "")
    if listener is not None:
        await_gateway(listener, needed, deadline.remaining)
        report("gateway", "running", f"at {listener.url}")
    return missing


def await_gateway(listener: HttpListener, needed: list[Child], timeout_s: float) -> None:
    """Wait until a gateway answers, which needs these processes; errors as for `await_ready`."""
    for _ in _looks(needed, Deadline(timeout_s), {"gateway"}):
        if listener.answers(timeout_s=1.0):
            return


def await_drafter(
    child: Child,
    old: Child | None,
    link: OrchestratorLink,
    timeout_s: float,
    *,
    meanwhile: Callable[[], None],
    ended: Callable[[], bool],
) -> None:
    """Wait until the orchestrator knows this drafter; tell it if `old` ends before that.

    Args:
        child: the new drafter.
        old: the drafter that it replaces, if there is one.
        link: connection to the orchestrator.
        timeout_s: longest wait.
        meanwhile: called repeatedly.
        ended: returns True if the stack has ended, so that no drafter is needed.

    Raises:
        SsdError: the drafter ended, with its reason, or was not ready in time.
    """
    reported = False
    for _ in _looks([child], Deadline(timeout_s), {"new drafter"}):
        if ended():
            raise RuntimeFailure("the stack ended before the new drafter was ready")
        meanwhile()
        if (
            not reported and old is not None and old.exit_code is not None
        ):  # otherwise requests would wait for its drafts
            reported = True
            reason = old.last_words()
            link.report_service_down(
                ServiceDown(role="drafter", pid=old.pid, reason=reason, final=False)
            )
        status = link.await_status(_STATUS_TIMEOUT_S)
        if status and child.pid in {service.pid for service in status.services}:
            return


def _looks(
    needed: list[Child],
    deadline: Deadline,
    missing: Collection[str],
    ended: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Yield for each check, until the caller is done; raise once waiting is useless."""
    while True:
        if ended():
            raise RuntimeFailure("the stack was stopped before it was ready")
        _raise_if_dead(needed)
        if deadline.passed:
            raise DeadlineExceeded(
                f"the {' and '.join(sorted(missing))} did not become ready within "
                f"{deadline.seconds:g} s ({START_LIMIT})"
            )
        yield
        time.sleep(TICK_S)


def _may_start_without(
    children: Mapping[str, Child], missing: set[str], deadline: Deadline
) -> bool:
    return (
        not missing
        or deadline.passed
        or any(children[role].exit_code is not None for role in missing)
    )


def _raise_if_dead(needed: list[Child]) -> None:
    """Raise if a child has ended during the start; the first cause counts."""
    for child in needed:
        if child.exit_code is not None:
            kind = BY_EXIT_CODE.get(child.exit_code, RuntimeFailure)
            raise kind(child.last_words())
