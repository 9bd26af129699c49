"""`ssd draft-server`: a drafter for another program, or for another machine."""

import os
import sys

import click

from launch.keyring import check_address, own_keys, public_key
from launch.models.hub import resolve
from launch.models.own_drafters import default_target
from launch.models.pair import drafter_folder
from launch.settings.flags import Command
from launch.settings.machine import compute_threads, module_command
from protocol.errors import UsageError
from protocol.jobs.draft_server import DraftServerSettings
from protocol.settings import (
    OWN_BACKENDS,
    BackendName,
    encode_settings,
)


@click.command("draft-server", cls=Command)
@click.option("--stdio", is_flag=True, help="Serve standard input and output.")
@click.option("--lines", is_flag=True, help="Speak the line protocol.")
@click.option(
    "--listen", default="", metavar="ADDRESS", help="Serve other machines on tcp://HOST:PORT."
)
@click.option(
    "--trust",
    multiple=True,
    metavar="KEY",
    help="Key that may connect, or its name in `ssd keys`; repeatable.",
)
@click.option("--key", default="default", show_default=True, help="Which of your own keys to use.")
@click.option("--backend", type=click.Choice(OWN_BACKENDS), default="mlx", show_default=True)
@click.option(
    "--model", default="", help="Draft model: folder or hub name; else the default drafter."
)
@click.option("--target", default="", help="For head: the target, as folder or hub name.")
def command(
    *,
    stdio: bool,
    lines: bool,
    listen: str,
    trust: tuple[str, ...],
    key: str,
    backend: BackendName,
    model: str,
    target: str,
) -> None:
    """Draft for another program or another machine.

    The protocols are in docs/guide/draft-server.md; logs go to standard error.
    """
    _check_way(stdio=stdio, lines=lines, listen=listen, trust=trust)
    if (backend == "head") != bool(target):
        raise UsageError("the head backend needs --target, and no other backend takes it")
    settings = DraftServerSettings(
        backend=backend,
        model=drafter_folder(backend, model, default_target()),
        target=str(resolve(target)) if target else "",
        lines=lines,
        listen=check_address(listen) if listen else "",
        key_file=str(own_keys(key)) if listen else "",
        trusted=tuple(public_key(name) for name in trust),
        threads=compute_threads(),
    )
    # Replace this process, so that the host's pipes and signals reach the server itself.
    command = [*module_command("services.drafter.server.main"), encode_settings(settings)]
    os.execv(sys.executable, command)  # noqa: S606  # no shell is needed


def _check_way(*, stdio: bool, lines: bool, listen: str, trust: tuple[str, ...]) -> None:
    """Raise UsageError unless the flags specify whom to serve, and how."""
    if stdio == bool(listen):
        raise UsageError("a draft server needs either --stdio or --listen")
    if listen and lines:
        raise UsageError("the line protocol is for --stdio")
    if bool(listen) != bool(trust):
        raise UsageError("--listen and --trust go together: --trust names who may connect")
