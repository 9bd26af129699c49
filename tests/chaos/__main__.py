"""`python -m tests.chaos COMMAND`: what `make chaos`, `make soak` and the like run."""

import click

from launch.cli import run
from tests.chaos import chaos, hostile, models, soak


@click.group()
def cli() -> None:
    """Faults and long loads against a stack of real processes."""


cli.add_command(chaos.command)
cli.add_command(soak.command)
cli.add_command(hostile.command)
cli.add_command(models.command)

if __name__ == "__main__":
    run(cli, "python -m tests.chaos")
