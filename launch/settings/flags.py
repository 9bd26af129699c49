"""Flags in groups, as `--help` lists them."""

from typing import Any

import click

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
    """A command whose help has groups."""

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
