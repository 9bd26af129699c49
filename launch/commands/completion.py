"""`ssd completion`: shell completion of commands and flags."""

import click
from click.shell_completion import get_completion_class

from launch.settings.flags import Command
from launch.terminal import console
from protocol.errors import UsageError

_PROGRAM = "ssd"
_VARIABLE = "_SSD_COMPLETE"
"""Variable by which the shell's script asks; click answers it in `cli.main`."""


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print a shell completion script."""
    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(f"there is no completion for {shell!r}")
    script = kind(context.find_root().command, {}, _PROGRAM, _VARIABLE).source()
    console.write(script + "\n")
