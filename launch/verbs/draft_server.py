"""`ssd draft-server`: one of our drafters for another program, on standard input and output."""

import os
import sys

import click

from launch.config import compute_threads
from launch.models import drafter_folder
from protocol.draft_server import DraftServerSettings
from protocol.errors import UsageError
from protocol.settings import OWN_BACKENDS, BackendName, encode_settings


@click.command("draft-server")
@click.option("--stdio", is_flag=True, help="Serve standard input and output.")
@click.option("--lines", is_flag=True, help="The line protocol: READY, DRAFT, TOKENS.")
@click.option("--backend", type=click.Choice(OWN_BACKENDS), default="mlx", show_default=True)
@click.option("--model", default="", help="Model folder or hub name; else the default drafter.")
@click.option("--threads", type=click.IntRange(min=1), help="Of the BLAS; else one per core.")
@click.option(
    "--prefill-step-size",
    type=click.IntRange(min=1),
    default=DraftServerSettings(backend="mlx").prefill_step_size,
    show_default=True,
)
def command(
    *,
    stdio: bool,
    lines: bool,
    backend: BackendName,
    model: str,
    threads: int | None,
    prefill_step_size: int,
) -> None:
    """Draft for another program, which talks to standard input and output.

    What is spoken there is described in docs/DRAFT_SERVER.md; logs go to standard error.
    """
    if not stdio:
        raise UsageError("a draft server needs --stdio, the only way to it so far")
    settings = DraftServerSettings(
        backend=backend,
        model=drafter_folder(backend, model),
        lines=lines,
        threads=threads or compute_threads(),
        prefill_step_size=prefill_step_size,
    )
    # In our place: the host's pipes, signals and waits then concern the server itself.
    arguments = [sys.executable, "-P", "-m", "services.draft_server", encode_settings(settings)]
    os.execv(sys.executable, arguments)  # noqa: S606  # no shell is wanted
