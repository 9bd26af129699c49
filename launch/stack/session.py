"""A client session: attach to the running stack if it fits, else start a private one."""

import contextlib
import os
import secrets
from collections.abc import Iterator

from launch.models.hub import resolve
from launch.models.pair import adapter_folder, pair_of
from launch.settings.settings import StackSettings
from launch.stack.run_dir import RunDir
from launch.stack.supervisor import Report, Supervisor
from protocol.client.client import Client
from protocol.errors import DeadlineExceeded


@contextlib.contextmanager
def session(settings: StackSettings, name: str, report: Report) -> Iterator[Client]:
    """A client of the stack `name` if it runs the wanted models, else of a private stack.

    Raises:
        SsdError: the stack cannot be started (see `Supervisor.start`).
    """
    shared = RunDir(name)
    if _fits(shared, settings):
        with contextlib.closing(Client(shared.clients_address)) as client:
            yield client
        return
    with private_stack(settings, report) as supervisor:
        client = Client(supervisor.run_dir.clients_address)
        with contextlib.closing(client):
            yield client


@contextlib.contextmanager
def private_stack(settings: StackSettings, report: Report) -> Iterator[Supervisor]:
    """A stack of one's own, stopped at the end."""
    name = f"private-{os.getpid()}-{secrets.token_hex(2)}"
    supervisor = Supervisor(settings, pair_of(settings), RunDir(name), report)
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.stop()


def _fits(run_dir: RunDir, settings: StackSettings) -> bool:
    """Whether a living stack runs what is wanted.

    Who names a drafter, a device or a way of computing prompts gets a new one.
    """
    running = run_dir.running()
    names_drafter = settings.draft_model or settings.draft_command or settings.draft_server
    if running is None or not running.model:
        return False
    if names_drafter or settings.draft_backend != "auto":
        return False
    if (
        settings.target_device
        or settings.draft_device
        or settings.emulate_target_cost
        or running.adapter != adapter_folder(settings)
        or settings.target_ranks != 1
        or settings.hosts
        or settings.prefill != "mlx"
        or settings.compute_units != "auto"
    ):
        return False
    if settings.model and running.model != str(resolve(settings.model)):
        return False
    with contextlib.closing(Client(run_dir.clients_address)) as client:
        try:
            client.status(timeout_s=2.0)
        except DeadlineExceeded:
            return False
    return True
