"""`ssd launch`: a stack that keeps running."""

from typing import Any

import click

from launch import show
from launch.models import pair_of
from launch.options import settings_of, stack_options
from launch.rundir import DEFAULT_NAME, RunDir
from launch.supervisor import Supervisor


@click.command("launch")
@stack_options()
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the stack.")
def command(name: str, **stack: Any) -> None:
    """Start a stack and keep it running until Ctrl-C."""
    settings = settings_of(**stack)
    supervisor = Supervisor(settings, pair_of(settings), RunDir(name), show.process_line)
    supervisor.start()
    try:
        show.human().print("ready; Ctrl-C stops everything")
        supervisor.wait()
    finally:
        supervisor.stop()
        show.human().print("stopped")
