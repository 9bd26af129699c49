"""A client session: attach to a suitable running stack, or start a private one."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from launch.models.coreml_models import find_converted
from launch.models.hub import resolve
from launch.models.pair import drafter_folder, pair_of
from launch.settings.settings import StackSettings, name_settings
from launch.stack.run_dir import Description, RunDir
from launch.stack.supervisor import Report, Supervisor
from launch.terminal import console
from protocol.client.client import Client
from protocol.errors import DeadlineExceeded


@contextlib.contextmanager
def session(settings: StackSettings, name: str, report: Report) -> Iterator[Client]:
    """Yield a client of the stack `name` if it runs these models, else of a private stack.

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
    """Yield a private stack, stopped at the end."""
    name = f"private-{os.getpid()}-{secrets.token_hex(2)}"
    supervisor = Supervisor(settings, pair_of(settings), RunDir(name), report)
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.stop()


def _fits(run_dir: RunDir, settings: StackSettings) -> bool:
    """Return True if a running stack matches the settings; report the differences."""
    running = run_dir.running()
    if running is None or not running.model:
        return False
    if others := find_differences(running, settings):
        console.note(f"the running stack has another {', '.join(others)}: a private one is started")
        return False
    with contextlib.closing(Client(run_dir.clients_address)) as client:
        try:
            client.status(timeout_s=2.0)
        except DeadlineExceeded:
            return False
    return True


def find_differences(running: Description, settings: StackSettings) -> list[str]:
    """Return the names of explicit settings that a stack does not match.

    Settings with default values match any stack.
    """
    named = name_settings(settings) | {"adapter_path": ""}
    if settings.adapter_path:
        from launch.models.programs import adapter_folder  # noqa: PLC0415

        named["adapter_path"] = adapter_folder(settings)
    if settings.model:
        named["model"] = str(resolve(settings.model))
    if settings.draft_model:
        folder = Path(drafter_folder("mlx", settings.draft_model, Path(running.model)))
        if running.settings.get("draft_backend") == "coreml":
            folder = find_converted(folder) or folder
        named["draft_model"] = str(folder)
    has = {
        **running.settings,
        "model": running.model,
        "adapter_path": running.adapter,
        "draft_model": running.draft_model,
    }
    default = StackSettings()
    return [name for name, value in named.items() if value != has.get(name, getattr(default, name))]
