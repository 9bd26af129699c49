"""`ssd serve`: a stack behind an OpenAI-compatible HTTP API."""

from typing import Any

import click

from launch.commands import launch
from launch.settings.flags import Command
from launch.settings.options import http_options, stack_options
from launch.stack.run_dir import DEFAULT_NAME


@click.command("serve", cls=Command)
@stack_options()
@http_options()
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the stack.")
def command(name: str, **options: Any) -> None:
    """Serve OpenAI's and Anthropic's HTTP APIs until Ctrl-C.

    OpenAI clients use base_url http://127.0.0.1:8080/v1. The server listens on this machine
    only; an address that others can reach needs an API key.
    """
    launch.run(name, {**options, "http": True})
