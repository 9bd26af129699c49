"""A client session: attach to the running stack if it fits, else start a private one."""

import contextlib
import os
from collections.abc import Iterator

from launch.config import StackSettings
from launch.models import pair_of
from launch.rundir import RunDir
from launch.supervisor import Report, Supervisor
from orchestrator.client import Client
from protocol.errors import DeadlineExceeded


@contextlib.contextmanager
def session(settings: StackSettings, name: str, report: Report) -> Iterator[Client]:
    """A client of the stack `name` if it runs the wanted models, else of a private stack.

    Raises:
        SsdError: the stack cannot be started (see `Supervisor.start`).
    """
    shared = RunDir(name)
    if _fits(shared, settings):
        client = Client(shared.clients_address)
        try:
            client.status(timeout_s=2.0)
            yield client
            return
        except DeadlineExceeded:
            pass  # it ended between our look and our question
        finally:
            client.close()
    with private_stack(settings, report) as supervisor:
        client = Client(supervisor.run_dir.clients_address)
        with contextlib.closing(client):
            yield client


@contextlib.contextmanager
def private_stack(settings: StackSettings, report: Report) -> Iterator[Supervisor]:
    """A stack of one's own, stopped at the end."""
    supervisor = Supervisor(
        settings, pair_of(settings), RunDir(f"private-{os.getpid()}"), report
    )
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()


def _fits(run_dir: RunDir, settings: StackSettings) -> bool:
    """Whether a living stack runs the target that is wanted; its drafter is its own affair."""
    running = run_dir.running()
    if running is None:
        return False
    return not settings.model or running.model == pair_of(settings).model
