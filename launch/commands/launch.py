"""`ssd launch`: a stack that keeps running."""

from typing import Any

import click

from launch.models.pair import pair_of
from launch.settings.flags import Command
from launch.settings.options import http_options, settings_of, stack_options
from launch.stack.run_dir import DEFAULT_NAME, RunDir
from launch.stack.supervisor import Supervisor
from launch.terminal import console


@click.command("launch", cls=Command)
@stack_options()
@http_options()
@click.option("--http", is_flag=True, default=None, help="Also serve HTTP, as `ssd serve` does.")
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the stack.")
def command(name: str, **options: Any) -> None:
    """Start a stack and keep it running until Ctrl-C."""
    run(name, options)


def run(name: str, options: dict[str, Any]) -> None:
    """Keep the stack that these options describe running until it is interrupted."""
    settings = settings_of(**options)
    supervisor = Supervisor(settings, pair_of(settings), RunDir(name), console.process_line)
    ready = False
    try:
        supervisor.start()
        ready = True
        where = (
            f" OpenAI-compatible API at {supervisor.listener.url}/v1;"
            if supervisor.listener
            else ""
        )
        console.stderr().print(f"ready;{where} Ctrl-C stops everything")
        supervisor.wait()
    finally:
        supervisor.stop()
        if ready:
            console.stderr().print("stopped")
