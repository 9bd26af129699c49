"""`ssd swap-drafter`: replaces the drafter of a running stack."""

from typing import Protocol, get_args

import click

from launch.keyring import public_key
from launch.models.programs import command_of
from launch.settings.flags import Command
from launch.settings.settings import BackendChoice, stack_settings
from launch.stack.control import ask_supervisor, running_stack
from launch.stack.orchestrator_link import OrchestratorLink
from launch.stack.run_dir import DEFAULT_NAME
from launch.terminal import console
from protocol.errors import RuntimeFailure
from protocol.messages import Status, SwapDrafter
from protocol.transport.address import find_tcp_error

_CONNECT_S = 3.0
_TIMEOUT_FACTOR = 3.0
"""Of the setting: the supervisor gives large models more time, and its own refusal says more."""
_REPORT_EVERY_S = 10.0
_CHOICES = [name for name in get_args(BackendChoice) if name != "auto"]


@click.command("swap-drafter", cls=Command)
@click.option(
    "--draft-backend",
    type=click.Choice(_CHOICES),
    required=True,
    help="What drafts from now on. none, ngram: no drafter; prompts are looked up.",
)
@click.option("--draft-model", default="", help="For mlx, head and coreml: folder or hub name.")
@click.option("--draft-command", default="", help="For stdio: the program that drafts.")
@click.option("--draft-lines", is_flag=True, help="For stdio: it speaks the line protocol.")
@click.option("--draft-server", default="", help="For remote: where it listens, tcp://HOST:PORT.")
@click.option(
    "--draft-server-key", default="", help="For remote: its public key, or its name in `ssd keys`."
)
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the stack.")
def command(
    *,
    draft_backend: str,
    draft_model: str,
    draft_command: str,
    draft_lines: bool,
    draft_server: str,
    draft_server_key: str,
    name: str,
) -> None:
    """Replace the drafter of a running stack; requests go on."""
    timeout_s = _TIMEOUT_FACTOR * stack_settings({}).start_timeout_s
    swap = SwapDrafter(
        backend=draft_backend,
        model=draft_model,
        command=list(command_of(draft_command)),
        lines=draft_lines,
        server=draft_server,
        server_key=public_key(draft_server_key) if draft_server_key else "",
    )
    if draft_server and (reason := find_tcp_error(draft_server, _CONNECT_S)):
        raise RuntimeFailure(reason)
    clients_address = running_stack(name).clients_address
    lookup = draft_backend in {"none", "ngram"}
    what = draft_model or draft_server or ("prompt lookup" if lookup else draft_backend)
    console.note(f"switching to {what}; until it is ready, requests keep the old drafter")
    with OrchestratorLink(clients_address) as link:
        progress = SwapProgress(link, what)
        ask_supervisor(name, swap, timeout_s, meanwhile=progress.report)
    console.note(f"switched: the stack {name!r} now drafts with {what}")


class StatusLink(Protocol):
    """A connection that asks the orchestrator for its status without waiting."""

    def request_status(self) -> None:
        """Ask."""
        ...

    def poll_status(self) -> Status | None:
        """Return the latest answer, if there is a new one."""
        ...


class SwapProgress:
    """Sentences on a swap while the supervisor is at work on it."""

    def __init__(self, link: StatusLink, what: str) -> None:
        self._link = link
        self._what = what
        self._before: int | None = None
        """The drafter's process at first; 0: there was none."""
        self._is_ready = False
        self._report_at_s = _REPORT_EVERY_S

    def report(self, waited_s: float) -> None:
        """Say that the new drafter is ready, or still being loaded."""
        self._link.request_status()
        status = self._link.poll_status()
        if status is not None and not self._is_ready:
            pid = next((s.pid for s in status.services if s.role == "drafter"), 0)
            self._before = pid if self._before is None else self._before
            self._is_ready = pid not in (0, self._before)
            if self._is_ready:
                console.note(f"ready: {self._what}, after {waited_s:.0f} s")
        if not self._is_ready and waited_s >= self._report_at_s:
            self._report_at_s += _REPORT_EVERY_S
            console.note(f"still loading {self._what}, {waited_s:.0f} s so far")
