"""Flags in groups, as `--help` lists them, and flags that had another name."""

from typing import Any

import click

from launch.terminal import console

FORMER_NAMES = {
    "--fan-out": "--branches",
    "--memory": "--learned-estimates",
    "--no-memory": "--no-learned-estimates",
}
"""Former name of a flag -> its name; this version still takes the former one."""

ORDER = (
    "Prompt",
    "Sampling",
    "Answer",
    "HTTP",
    "Models",
    "Several models",
    "Processes",
    "Ranks",
    "Speculation",
    "Options",
)
"""How groups follow each other; `Options` is what belongs to none."""


class Option(click.Option):
    """A flag that `--help` lists under the heading `group`."""

    def __init__(self, *arguments: Any, group: str = "Options", **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.group = group
        if self.metavar is None and isinstance(self.type, click.IntRange):
            self.metavar = "N"
        elif self.metavar is None and isinstance(self.type, click.FloatRange):
            self.metavar = "X"


class Command(click.Command):
    """A command whose help has groups, and which takes former names of flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; a former name works, and stderr says so."""
        end = args.index("--") if "--" in args else len(args)
        renamed = [_rename(argument) for argument in args[:end]]
        return super().parse_args(ctx, [*renamed, *args[end:]])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The flags under their headings."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ORDER}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups[getattr(parameter, "group", "Options")].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def _rename(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    if flag not in FORMER_NAMES:
        return argument
    name = FORMER_NAMES[flag]
    console.stderr().print(f"{flag} is now called {name}", markup=False)
    return f"{name}{equals}{value}"
