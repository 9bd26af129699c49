"""`ssd swap-drafter`: another drafter for a running stack."""

import click

from launch.keyring import public_key
from launch.models.pair import command_of
from launch.settings.settings import stack_settings
from launch.stack.control import ask_supervisor
from launch.stack.run_dir import DEFAULT_NAME
from launch.terminal import console
from protocol.errors import RuntimeFailure
from protocol.messages import SwapDrafter
from protocol.settings import BACKENDS
from protocol.transport.address import find_tcp_error

_CONNECT_S = 3.0


@click.command("swap-drafter")
@click.option("--backend", type=click.Choice(BACKENDS), required=True)
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
    backend: str,
    draft_model: str,
    draft_command: str,
    draft_lines: bool,
    draft_server: str,
    draft_server_key: str,
    name: str,
) -> None:
    """Replace the drafter of a running stack; requests go on."""
    timeout_s = stack_settings({}).start_timeout_s
    swap = SwapDrafter(
        backend=backend,
        model=draft_model,
        command=list(command_of(draft_command)),
        lines=draft_lines,
        server=draft_server,
        server_key=public_key(draft_server_key) if draft_server_key else "",
    )
    if draft_server and (reason := find_tcp_error(draft_server, _CONNECT_S)):
        raise RuntimeFailure(reason)
    ask_supervisor(name, swap, timeout_s)
    console.stderr().print(f"the stack {name!r} now drafts with {backend}")
