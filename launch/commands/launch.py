"""`ssd launch`: a stack that keeps running."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import click

from launch.models.pair import pair_of
from launch.settings.flags import Command
from launch.settings.options import http_options, settings_of, stack_options
from launch.settings.settings import StackSettings
from launch.signals import Terminated
from launch.stack.log_file import LogFile, parse_line
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
    run(settings_of(**options), name)


def run(settings: StackSettings, name: str) -> None:
    """Keep the stack with these settings running until it is interrupted.

    SIGTERM is the regular end, as service managers expect.
    """
    with contextlib.suppress(Terminated):
        _run(settings, name)


def _run(settings: StackSettings, name: str) -> None:
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
        supervisor.wait(print_requests(supervisor.run_dir) if supervisor.listener else None)
    finally:
        supervisor.stop()
        if ready:
            console.stderr().print("stopped")


def print_requests(run_dir: RunDir) -> Callable[[], None]:
    """Return a function that prints a line for each HTTP request ended since its last call."""
    log = LogFile(run_dir.log("gateway"))

    def print_new() -> None:
        for _, line in log.read_new():
            fields = parse_line(line)
            if "route" in fields:
                clock = time.strftime("%H:%M:%S", time.localtime(float(str(fields["time"]))))
                text = f"{clock}  {fields['route']}  {fields['message']}"
                console.stderr().print(text, markup=False)

    return print_new
