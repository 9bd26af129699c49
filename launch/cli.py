"""`ssd`: the command line."""

import importlib
import importlib.util
import sys
from pathlib import Path

import click

from launch import signals
from launch.settings.flags import Group
from launch.terminal import console
from protocol.errors import RuntimeFailure, SsdError
from protocol.version import DISTRIBUTION, VERSION

_INTERRUPTED = 130

_COMMANDS = {
    "bench": ("bench", "command"),
    "chat": ("chat", "command"),
    "claude": ("agents", "claude"),
    "codex": ("agents", "codex"),
    "completion": ("completion", "command"),
    "convert": ("convert", "command"),
    "demo": ("demo", "command"),
    "distill": ("distill", "command"),
    "doctor": ("doctor", "command"),
    "draft-server": ("draft_server", "command"),
    "generate": ("generate", "command"),
    "keys": ("keys", "command"),
    "launch": ("launch", "command"),
    "load": ("load", "command"),
    "logs": ("logs", "command"),
    "mac-check": ("mac_check", "command"),
    "models": ("models", "command"),
    "serve": ("serve", "command"),
    "simulate": ("simulate", "command"),
    "swap-drafter": ("swap_drafter", "command"),
    "top": ("top", "command"),
}
"""Location of each command in `launch.commands`: the module, and its name there."""


class _Commands(Group):
    """Imports a command on demand: most runs need one, and all take half a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS and cmd_name not in self.commands:
            module, name = _COMMANDS[cmd_name]
            command = getattr(importlib.import_module(f"launch.commands.{module}"), name)
            self.add_command(command, cmd_name)
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(VERSION, prog_name=DISTRIBUTION)
def cli() -> None:
    """Lossless, faster local LLM decoding: speculative speculative decoding."""


def _check_shadowing() -> None:
    """Check that no other package hides ours, whose import names are generic."""
    home = Path(__file__).resolve().parent.parent
    for room in ("protocol", "services", "orchestrator"):
        spec = importlib.util.find_spec(room)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or origin.parent.parent != home:
            raise RuntimeFailure(
                f"the package {room!r} is imported from {origin}, not from {home}; "
                f"install {DISTRIBUTION} into an environment of its own"
            )


def main() -> None:
    """Entry point of `ssd`."""
    run(cli, "ssd")


def run(command: click.Command, name: str) -> None:
    """Run a command and turn errors into a sentence and an exit code."""
    try:
        _check_shadowing()
        signals.install()
        command.main(prog_name=name, standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(_INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except SsdError as error:
        console.stderr().print(f"error: {error}", markup=False)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(_INTERRUPTED)
    except OSError as error:  # a full disk, a folder that cannot be written
        console.stderr().print(f"error: {error}", markup=False)
        sys.exit(RuntimeFailure.exit_code)


if __name__ == "__main__":
    main()
