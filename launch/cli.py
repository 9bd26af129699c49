"""`ssd`: the command line."""

import importlib.util
import sys
from pathlib import Path

import click

from launch import help_text, signals
from launch.commands import (
    agents,
    bench,
    chat,
    completion,
    convert,
    demo,
    distill,
    doctor,
    draft_server,
    generate,
    keys,
    launch,
    load,
    logs,
    mac_check,
    models,
    serve,
    simulate,
    swap_drafter,
    top,
)
from launch.terminal import console
from protocol.errors import RuntimeFailure, SsdError
from protocol.version import DISTRIBUTION, VERSION

_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name=DISTRIBUTION)
def cli() -> None:
    """Lossless, faster local LLM decoding: speculative speculative decoding."""


for _module in (
    launch,
    mac_check,
    generate,
    chat,
    serve,
    swap_drafter,
    draft_server,
    keys,
    logs,
    bench,
    load,
    convert,
    demo,
    distill,
    doctor,
    models,
    simulate,
    top,
    completion,
):
    cli.add_command(_module.command)
cli.add_command(agents.claude)
cli.add_command(agents.codex)
help_text.complete(cli)


def _check_shadowing() -> None:
    """Our import names are generic; another package of such a name must not hide ours."""
    home = Path(__file__).resolve().parent.parent
    for room in ("protocol", "services", "orchestrator"):
        found = importlib.util.find_spec(room)
        origin = Path(found.origin).resolve() if found and found.origin else None
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


if __name__ == "__main__":
    main()
