"""`ssd doctor`: checks whether this machine is suitable."""

import sys
from typing import Any

import click
import msgspec
from rich.table import Table

from launch.doctor import DoctorReport, examine
from launch.settings.flags import Command
from launch.settings.options import settings_of, stack_options
from launch.terminal import console
from protocol.errors import RuntimeFailure

_MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "problem": "[red]no[/red]"}


@click.command("doctor", cls=Command)
@stack_options()
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def command(*, as_json: bool, **stack: Any) -> None:
    """Check this machine, its libraries and the pair.

    Starts no stack. The exit code is 4 if a stack cannot be started.
    """
    report = examine(settings_of(**stack))
    if as_json:
        console.write(msgspec.json.encode(report).decode() + "\n")
    else:
        console.stdout().print(_table(report))
    if not report.healthy:
        sys.exit(RuntimeFailure.exit_code)
    if not as_json:
        console.stdout().print(
            "ready; `ssd bench --only profile` measures what speculation gains here"
        )


def _table(report: DoctorReport) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    gigabytes = report.memory_bytes / 1e9, report.free_bytes / 1e9
    machine = "{}, {} cores, {:.1f} GB of memory, {:.1f} free".format(
        report.platform, report.cores, *gigabytes
    )
    table.add_row("", "machine", machine)
    versions = [f"{name} {version}" for name, version in report.versions.items() if version]
    table.add_row("", "versions", ", ".join(versions))
    for finding in report.findings:
        table.add_row(_MARKS[finding.level], finding.topic, finding.text)
    return table
