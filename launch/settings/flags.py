"""Flags in groups for `--help`, and `--set` for settings without a flag."""

import contextlib
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import click

from protocol.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

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
"""Order of the groups; `Options` holds the rest."""


class Option(click.Option):
    """A flag that `--help` lists under the heading `group`."""

    def __init__(self, *arguments: Any, group: str = "Options", **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.group = group
        if self.metavar is None and isinstance(self.type, click.IntRange):
            self.metavar = "N"
        elif self.metavar is None and isinstance(self.type, click.FloatRange):
            self.metavar = "X"


class _WithExamples(click.Command):
    """A command whose examples are read when its help is shown."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the page, with examples and the texts of shared flags."""
        from launch import help_text  # noqa: PLC0415

        help_text.complete(self, ctx.command_path.partition(" ")[2])
        return super().get_help(ctx)


class Command(_WithExamples):
    """A command whose help has groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags under their headings."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ORDER}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups[getattr(parameter, "group", "Options")].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class Group(_WithExamples, click.Group):
    """A group of such commands."""

    command_class = Command


def more_settings(names: Collection[str], group: str = "Options") -> Callable[[F], F]:
    """Add `--set NAME=VALUE` for these settings; `read_more` parses the values."""
    return click.option(
        "--set",
        "more",
        cls=Option,
        group=group,
        multiple=True,
        metavar="NAME=VALUE",
        help=f"Another setting (repeatable): {', '.join(names)}.",
    )


def read_more(pairs: Sequence[str], names: Collection[str]) -> dict[str, Any]:
    """Parse the settings of `--set`: numbers, lists of them by commas, booleans and words.

    Raises:
        UsageError: a setting has no value, or is not among `names`.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in names:
            raise UsageError(f"--set {pair!r}: give NAME=VALUE with one of {', '.join(names)}")
        values[name] = _read_value(text)
    return values


def _read_value(text: str) -> Any:
    for form in (text, f"[{text}]" if "," in text else text):
        with contextlib.suppress(ValueError):
            return json.loads(form)
    return text
