"""`ssd serve`: one model, or several, behind OpenAI's and Anthropic's HTTP APIs."""

import contextlib
from pathlib import Path
from typing import Any

import click

from launch.commands import launch
from launch.settings.flags import Command
from launch.settings.options import (
    http_options,
    settings_of,
    several_models_options,
    stack_options,
)
from launch.settings.settings import StackSettings
from launch.signals import Terminated
from launch.stack.run_dir import DEFAULT_NAME, RunDir
from launch.terminal import console


@click.command("serve", cls=Command)
@stack_options()
@http_options()
@several_models_options()
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the stack.")
def command(name: str, **options: Any) -> None:
    """Serve OpenAI's and Anthropic's HTTP APIs until Ctrl-C.

    OpenAI clients use base_url http://127.0.0.1:8080/v1. The server listens on this machine
    only; an address that others can reach needs an API key.
    """
    settings = settings_of(**options, http=True)
    if settings.models:
        with contextlib.suppress(Terminated):  # SIGTERM is the regular end
            _serve_many(settings, name)
    else:
        launch.run(settings, name)


def _serve_many(settings: StackSettings, name: str) -> None:
    """Keep a server of several models running until it is interrupted."""
    from launch.serving.model_server import ModelServer  # noqa: PLC0415  # not for one model
    from launch.serving.models_file import read_models  # noqa: PLC0415

    models = read_models(Path(settings.models).expanduser(), settings)
    server = ModelServer(settings, models, RunDir(name), console.process_line)
    ready = False
    try:
        server.start()
        ready = True
        names = ", ".join(model.name for model in models)
        console.stderr().print(
            f"ready; OpenAI-compatible API at {server.url}/v1 for {names}; Ctrl-C stops everything",
            markup=False,
        )
        server.wait(launch.print_requests(server.run_dir))
    finally:
        server.stop()
        if ready:
            console.stderr().print("stopped")
