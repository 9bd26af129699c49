"""`ssd logs`: the logs of a running stack."""

import time
from pathlib import Path

import click

from launch.settings.flags import Command
from launch.stack.log_file import LogFile, format_line, parse_line
from launch.stack.run_dir import DEFAULT_NAME, RunDir
from launch.terminal import console
from protocol.errors import UsageError

_TICK_S = 0.2
_LEVELS = ("debug", "info", "warning", "error")


def _reaches_level(line: str, level: str) -> bool:
    line_level = str(parse_line(line).get("level", "error"))
    return line_level not in _LEVELS or _LEVELS.index(line_level) >= _LEVELS.index(level)


@click.command("logs", cls=Command)
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the stack.")
@click.option("--role", multiple=True, help="Only this process (repeatable).")
@click.option("--level", type=click.Choice(_LEVELS), default="debug", help="This level and above.")
@click.option("-f", "--follow", is_flag=True, help="Follow until the stack ends.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as they were written.")
def command(*, name: str, role: tuple[str, ...], level: str, follow: bool, as_json: bool) -> None:
    """Show the logs of a running stack, ordered by time."""
    run_dir = RunDir(name)
    if run_dir.running() is None:
        raise UsageError(f"no stack named {name!r} is running; logs are removed with their stack")
    files: dict[Path, LogFile] = {}
    while True:
        for path in run_dir.path.glob("*.log"):
            if not role or path.stem in role:
                files.setdefault(path, LogFile(path))
        news = [(at, file.role, line) for file in files.values() for at, line in file.read_new()]
        for _, who, line in sorted(news, key=lambda item: item[0]):
            if _reaches_level(line, level):
                console.write((line if as_json else format_line(who, line)) + "\n")
        if not follow or run_dir.running() is None:
            return
        time.sleep(_TICK_S)
