"""`ssd models`: models on this machine."""

import click

from launch import show
from launch.models import add_default


@click.group("models")
def command() -> None:
    """Models on this machine."""


@command.command("add")
@click.argument("pair", type=click.Choice(["default"]))
def add(pair: str) -> None:
    """Set up a pair of models; `default` is SmolLM2-135M-Instruct and its drafter."""
    del pair
    add_default(show.human().print)
